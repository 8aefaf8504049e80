"""Answers held to schemas on the GPU: valid, the same in any company, and free rows keep their bits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import Runner
from tests.gpu.conftest import Make
from tests.support.driving import Reference
from tests.support.engines import complete
from tests.support.schemas import schemas
from tests.support.true_guesses import guess_truly

COUNT = 128
CONTEXT = 320


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile.open(demo_model())


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return {"slots": 32, "kv_pages": 32 * 20, "max_tokens": 2048, "tune": False, "context": CONTEXT}


class Held:
    """The grammars of the model, and requests under them."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self.vocabulary = Vocabulary.from_gguf(file)
        self.vocabulary.spell_all()
        self.vocab = spec.vocab
        self.grammars = Grammars(self.vocabulary, spec.vocab)

    def requests(self, asked: list[dict[str, Any]], **params: Any) -> list[Request]:
        rng = np.random.default_rng(5)
        return [
            Request(
                str(place), 1, tuple(rng.integers(0, self.vocab, 3 + place % 20).tolist()),
                GenerationParams.parse({"max_tokens": 250} | params), seed=place,
                constrained=JobSpec.parse({"prompt": "x", **one}).constrained,
            )
            for place, one in enumerate(asked)
        ]  # fmt: skip

    def run(self, runner: Runner, requests: list[Request], *, drafts: bool = False) -> dict[str, Completion]:
        """A request with a schema is compiled first; others are free. With drafts, some must be right."""
        engine = Engine(
            runner,
            Detokenizer(
                text_stream=lambda: TextStream(self.vocabulary, strip_space=False),
                eos_ids=self.vocabulary.eos_ids,
                decode=self.vocabulary.decode,
            ),
            EngineSizes(context_length=CONTEXT, max_sequences=runner.slots, token_budget=512),
            constraints=self.grammars,
            drafts=Drafts.NGRAM if drafts else Drafts.OFF,
        )
        begun = [
            one
            if one.constrained is None
            else replace(one, constraint=self.grammars.compile(one.constrained).result()())
            for one in requests
        ]
        done = complete(engine, begun)
        assert not drafts or engine.stats.guessed_right > 0
        return done


@pytest.fixture(scope="module")
def held(file: GgufFile, spec: ModelSpec) -> Iterator[Held]:
    made = Held(file, spec)
    yield made
    made.grammars.close()


def outcomes(done: dict[str, Completion]) -> dict[str, tuple[tuple[int, ...], str, StopReason]]:
    return {name: (one.token_ids, one.text, one.stop_reason) for name, one in done.items()}


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}])
def test_every_finished_answer_obeys_its_schema_however_steps_are_computed(
    make: Make, held: Held, params: dict[str, Any]
) -> None:
    made = schemas(seed=23, count=COUNT)
    requests = held.requests([{"json_schema": schema} for _, schema in made], **params)
    found = [
        outcomes(held.run(make(**other), requests))
        for other in ({}, {"graphs": False}, {"depth": 1}, {"depth": 3, "kv_pages": 60})
    ]
    assert all(one == found[0] for one in found)
    finished = 0
    for place, (_, schema) in enumerate(made):
        _, text, reason = found[0][str(place)]
        assert reason in (StopReason.EOS, StopReason.LENGTH, StopReason.CONTEXT_FULL)
        if reason is StopReason.EOS:
            finished += 1
            Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))
    assert finished > COUNT // 2


LONG_KEYS = {
    "type": "object",
    "properties": {
        "headline of the text": {"type": "string", "maxLength": 8},
        "category of the text": {"enum": ["first of all", "second of all"]},
    },
    "required": ["headline of the text", "category of the text"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_drafts_change_no_answer(
    make: Make, held: Held, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """By guesses of the engine's own, and by others of which most are right and some may not follow."""
    made = [schema for _, schema in schemas(seed=31, count=3)]
    asked: list[dict[str, Any]] = [{"json_schema": schema} for schema in [*made, made[0]]]
    asked += [{"regex": "(only this and )+nothing more"}, {"choice": ["a rather long answer", "a short one"]}]
    requests = held.requests(
        [*asked, {"json_schema": LONG_KEYS}, {"json_schema": LONG_KEYS}, {}], max_tokens=80
    )
    plain = outcomes(held.run(make(graphs=graphs), requests))
    assert outcomes(held.run(make(graphs=graphs), requests, drafts=True)) == plain
    guess_truly(monkeypatch, {name: one[0] for name, one in plain.items()}, vocab=held.vocab)
    assert outcomes(held.run(make(graphs=graphs), requests, drafts=True)) == plain
    assert outcomes(held.run(make(graphs=graphs), requests[2:4], drafts=True)) == {
        one.job_id: plain[one.job_id] for one in requests[2:4]
    }


def test_free_rows_keep_their_bits_beside_rows_that_are_held(make: Make, held: Held) -> None:
    made = schemas(seed=29, count=60)
    requests = held.requests([{"json_schema": schema} for _, schema in made], max_tokens=80)
    free = [replace(one, constrained=None) for one in requests[::3]]
    mixed = [replace(one, constrained=None) if place % 3 == 0 else one for place, one in enumerate(requests)]
    alone = outcomes(held.run(make(), free))
    for other in ({}, {"graphs": False}):
        beside = outcomes(held.run(make(**other), mixed))
        assert {name: beside[name] for name in alone} == alone


def test_what_the_grammar_decides_alone_is_the_references(
    make: Make, held: Held, file: GgufFile, spec: ModelSpec
) -> None:
    """Where one token at a time can follow, both runners must write the same text."""
    requests = held.requests([{"regex": "(ab){40}"}, {"choice": ["only this"]}], temperature=1.0)
    theirs = held.run(Reference(file, spec, kv_pages=40, slots=2).runner, requests)
    ours = held.run(make(), requests)
    for name, one in theirs.items():
        assert (ours[name].text, ours[name].stop_reason) == (one.text, one.stop_reason)
    assert ours["0"].text == "ab" * 40 and ours["1"].text == "only this"
