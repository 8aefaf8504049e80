"""A text under a schema is the same however often it is interrupted: masks hang on its tokens alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.request import Completion
from nightmill.worker.link.preparing import Preparing
from tests.support.constrained import Constrained
from tests.support.ggufs import write_model
from tests.support.schemas import schemas

pytestmark = pytest.mark.heavy

ASKED: list[dict[str, Any]] = [
    *({"json_schema": schema} for _, schema in schemas(seed=7, count=27)),
    {"regex": r"([a-z]{1,4} ){2,9}\."},
    {"grammar": 'start: "[" (start | /[0-9]+/)* "]"'},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constrained]:
    with Constrained(write_model(tmp_path_factory.mktemp("model") / "bytes.gguf")) as made:
        yield made


def outcome(one: Completion) -> tuple[tuple[int, ...], str, StopReason, str | None]:
    return one.token_ids, one.text, one.stop_reason, one.error


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, len(ASKED) - 1),
    seed=st.integers(0, 2**31),
    cut=st.integers(0, 59),
    depth=st.integers(1, 3),
)
def test_a_text_goes_on_from_saved_tokens_as_if_nothing_had_happened(
    model: Constrained, place: int, seed: int, cut: int, depth: int
) -> None:
    request = model.request("j", seed % 1000, ASKED[place], max_tokens=60)
    whole = model.run([request])["j"]
    saved = whole.token_ids[: min(cut, len(whole.token_ids) - 1)]
    again = model.run([replace(request, attempt=2, generated_ids=saved)], depth=depth)["j"]
    assert outcome(again) == outcome(whole)


def test_sequences_that_give_way_to_each_other_write_the_same_texts(model: Constrained) -> None:
    requests = [model.request(str(n), n, asked, max_tokens=50) for n, asked in enumerate(ASKED)]
    roomy = model.run(requests, slots=len(ASKED))
    for depth in (1, 3):
        engine = model.engine(slots=8, kv_pages=12, context=128, depth=depth)
        tight = model.run(requests, engine)
        assert engine.stats.preemptions > 0
        assert {name: outcome(one) for name, one in tight.items()} == {
            name: outcome(one) for name, one in roomy.items()
        }


def test_what_is_abandoned_at_any_step_goes_on_elsewhere(model: Constrained) -> None:
    requests = {str(n): model.request(str(n), n, asked, max_tokens=40) for n, asked in enumerate(ASKED)}
    expected = model.run(list(requests.values()), slots=len(ASKED))
    done: dict[str, Completion] = {}
    for steps in (2, 5, 9, 100_000):
        engine = model.engine(slots=8, context=128)
        preparing = Preparing(engine)
        for name in requests.keys() - done.keys():
            preparing.submit(requests[name])
        for _ in range(steps):
            preparing.look()
            if not engine.has_work and not len(preparing):
                break
            done |= {one.job_id: one for one in engine.step()} if engine.has_work else {}
        left = [*engine.abandon(), *preparing.abandon()]
        done |= {one.job_id: one for one in engine.step()} if engine.has_work else {}
        for one in left:
            before = requests[one.job_id]
            requests[one.job_id] = replace(before, attempt=before.attempt + 1, generated_ids=one.token_ids)
    assert {name: outcome(one) for name, one in done.items()} == {
        name: outcome(one) for name, one in expected.items()
    }


def test_tokens_that_the_grammar_does_not_allow_end_that_job_alone(model: Constrained) -> None:
    """As if they had been saved by a worker that reads the schema in another way."""
    request = model.request("j", 1, {"choice": ["yes"]})
    foreign = model.vocabulary.tokens.index("q")
    done = model.run([replace(request, generated_ids=(foreign,)), model.request("k", 2, {"choice": ["yes"]})])
    assert done["j"].stop_reason is StopReason.ERROR and done["j"].error
    assert done["k"].text == "yes"


def test_cancelling_and_newer_attempts_reach_a_request_that_is_being_compiled(model: Constrained) -> None:
    engine = model.engine(slots=4, context=128)
    preparing = Preparing(engine)
    slow = {"json_schema": {"type": "integer", "multipleOf": 9_999_991}}
    first = model.request("a", 1, slow)
    preparing.submit(first)
    preparing.submit(first)  # the same attempt is one request
    preparing.submit(model.request("b", 1, slow))
    assert len(preparing) == 2
    preparing.submit(replace(first, attempt=3))
    preparing.submit(replace(first, attempt=2))  # which comes late
    preparing.cancel("b")
    assert {(one.job_id, one.attempt, one.stop_reason) for one in engine.step()} == {
        ("a", 1, StopReason.CANCELLED),
        ("a", 2, StopReason.CANCELLED),
        ("b", 1, StopReason.CANCELLED),
    }
    assert [(one.job_id, one.attempt) for one in preparing.abandon()] == [("a", 3)]
    assert not len(preparing)
