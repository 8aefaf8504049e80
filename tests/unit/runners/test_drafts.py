"""Drafts on the NumPy runner with the demo model: texts and log-probabilities are those without drafts."""

from dataclasses import replace

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.reference.runner import ReferenceRunner
from tests.support.engines import NoText, complete
from tests.support.true_guesses import guess_truly

VOCAB = 256
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
    file: GgufFile, asked: list[Request], *, drafts: bool, pages: int = 64
) -> tuple[dict[str, Completion], Engine]:
    runner = ReferenceRunner(file, read_spec(file), kv_pages=pages, page_size=16, slots=24)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=128, max_sequences=24, token_budget=256),
        drafts=drafts,
    )
    done = complete(engine, asked)
    engine.close()
    return done, engine


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
