"""Drafts on the NumPy runner with the demo model: texts and log-probabilities are those without drafts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.reference.runner import ReferenceRunner
from tests.support.engines import NoText, complete
from tests.support.thinning import thinned
from tests.support.true_guesses import guess_truly

pytestmark = pytest.mark.heavy

VOCAB = 4096
LENGTHS = [1, 15, 16, 17, 40]


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile.open(demo_model())


def requests() -> list[Request]:
    return [
        Request(
            str(index), 1, tuple(range(5, 5 + length)),
            GenerationParams(
                max_tokens=30, temperature=index % 2, ignore_eos=True, logprobs=index % 3 or None
            ),
            seed=70 + index,
        )
        for index, length in enumerate(LENGTHS)
    ]  # fmt: skip


def run(
    file: GgufFile, asked: list[Request], *, drafts: bool, pages: int = 64,
    grammars: Grammars | None = None, depth: int = 1,
) -> tuple[dict[str, Completion], Engine]:  # fmt: skip
    runner = ReferenceRunner(file, read_spec(file), kv_pages=pages, page_size=16, slots=24, depth=depth)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=Vocabulary.from_gguf(file).eos_ids),
        EngineSizes(context_length=128, max_sequences=24, token_budget=256),
        constraints=grammars,
        drafts=Drafts.NGRAM if drafts else Drafts.OFF,
    )
    if grammars is not None:
        asked = [
            replace(one, constraint=grammars.compile(one.constrained).result()()) if one.constrained else one
            for one in asked
        ]
    done = complete(engine, asked)
    runner.close()
    return done, engine


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "headline": {"type": "string", "maxLength": 8},
        "category": {"enum": ["first of all", "second of all", "something else"]},
        "certainty": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["headline", "category", "certainty"],
    "additionalProperties": False,
}
HELD: list[dict[str, Any]] = [
    {"json_schema": SCHEMA}, {"json_schema": SCHEMA}, {"regex": "(only this and )+nothing more"},
    {"choice": ["a rather long answer", "a rather short one"]}, {},
]  # fmt: skip


@pytest.fixture(scope="module")
def grammars(file: GgufFile) -> Iterator[Grammars]:
    vocabulary = Vocabulary.from_gguf(file)
    vocabulary.spell_all()
    made = Grammars(vocabulary, VOCAB)
    yield made
    made.close()


def held_requests(**params: Any) -> list[Request]:
    """Answers under constraints and one without; `params` for all."""
    return [
        Request(
            str(number), 1, tuple(range(5, 9 + 7 * number)),
            GenerationParams.parse({"max_tokens": 60, "temperature": number % 2, "logprobs": 2} | params),
            seed=40 + number,
            constrained=JobSpec.parse({"prompt": "x", **asked}).constrained,
        )
        for number, asked in enumerate(HELD)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "params"), thinned([(1, {}), (3, {}), (2, {"min_tokens": 20})], 3, first=2)
)
def test_drafts_change_no_bit_of_answers_under_constraints(
    file: GgufFile, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, depth: int, params: dict[str, Any]
) -> None:
    """By guesses of the engine's own, and by others of which some may not even follow."""
    asked = held_requests(**params)
    plain, before = run(file, asked, drafts=False, grammars=grammars)
    drafted, after = run(file, asked, drafts=True, grammars=grammars, depth=depth)
    assert drafted == plain
    assert after.stats.guessed_right > 20
    assert after.stats.step_sequences < before.stats.step_sequences
    guess_truly(monkeypatch, {name: one.token_ids for name, one in plain.items()}, vocab=VOCAB)
    drafted, after = run(file, asked, drafts=True, grammars=grammars, pages=12, depth=depth)
    assert drafted == plain
    assert after.stats.guessed_tokens > after.stats.guessed_right > 0


@pytest.mark.parametrize("pages", [64, 9], ids=["room for all", "some give way"])
def test_drafts_change_no_bit(file: GgufFile, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    plain, before = run(file, requests(), drafts=False)
    guess_truly(
        monkeypatch, {job_id: done.token_ids for job_id, done in plain.items()}, vocab=VOCAB, seed=pages
    )
    drafted, after = run(file, requests(), drafts=True, pages=pages)
    assert drafted == plain
    assert after.stats.guessed_tokens > after.stats.guessed_right > 0
    assert after.stats.steps < before.stats.steps or pages == 9
    assert (after.stats.preemptions > 0) == (pages == 9)


def test_a_greedy_text_that_repeats_its_prompt_takes_fewer_steps(file: GgufFile) -> None:
    """Guessed from its own words, not by the test: the prompt holds the answer, as where a text is edited."""
    first = requests()[-1]
    first = replace(first, params=GenerationParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    answer = run(file, [first], drafts=False)[0][first.job_id].token_ids
    again = replace(first, prompt_ids=(*first.prompt_ids, *answer, *first.prompt_ids))
    plain, before = run(file, [again], drafts=False)
    drafted, after = run(file, [again], drafts=True)
    assert drafted == plain
    assert after.stats.guessed_tokens > 0
    assert after.stats.generated_tokens == before.stats.generated_tokens
