"""Sequences under constraints: they draw what is allowed, and cost those beside them nothing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.jobs.base.contract import Constrained, ConstraintKind, StopReason
from nightmill.jobs.errors import ConstraintError, RunnerError
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.runners.base import IntArray, StepBatch
from tests.unit.engine.by_definition import EOS, Rule, expected
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

BEGINNINGS = [(), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4)]

texts = st.lists(
    st.tuples(
        st.sampled_from(BEGINNINGS),
        st.lists(st.integers(0, 14), min_size=1, max_size=6),
        st.sampled_from([None, 1, 2, 3]),
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 2**63 - 1),
                "max_tokens": st.integers(1, 25),
                "stop": st.sampled_from([(), ("ab",), ("é", "ST")]),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([(), (), (0, 4), tuple(range(EOS))]),
                "min_tokens": st.sampled_from([0, 0, 1]),
                "priority": st.integers(0, 2),
            }
        ),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda text: text[3]["seed"],  # the runner knows a text by its seed and its tokens
)


def outcome(one: Completion) -> tuple[tuple[int, ...], str, StopReason]:
    return one.token_ids, one.text, one.stop_reason


@settings(max_examples=150, deadline=None)
@given(
    texts,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([12, 60]),  # pages; with 12 sequences give way to each other
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, None, 9]),
)
def test_in_any_company_each_draws_what_it_draws_alone(
    drawn: list[Any], depth: int, pages: int, slots: int, sharing: bool, poison: int | None
) -> None:
    def requests(constrained: bool) -> list[Request]:
        return [
            make_request(f"j{n}", (*beginning, *rest), rule=rule, **params)
            for n, (beginning, rest, rule, params) in enumerate(drawn)
            if constrained or rule is None
        ]

    def complete(asked: list[Request]) -> dict[str, Completion]:
        runner = ScriptedRunner(kv_pages=pages, slots=slots, depth=depth, poison=poison)
        engine = make_engine(runner, context_length=40, prefix_sharing=sharing)
        for request in asked:
            engine.submit(request)
        return {one.job_id: one for one in run(engine)}

    mixed = complete(requests(True))
    for request in requests(True):
        one = mixed[request.job_id]
        assert outcome(one) == expected(request, 40, poison)
        if isinstance(request.constraint, Rule):
            for place, token in enumerate(one.token_ids):
                assert token in request.constraint.allowed([*one.token_ids[:place]])
    for job_id, free in complete(requests(False)).items():
        assert outcome(mixed[job_id]) == outcome(free)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_text_draws_in_every_step_constrained_or_free(depth: int) -> None:
    """A constrained one is computed before its last token is known, which is when its mask is made."""
    params = make_request(max_tokens=25, ignore_eos=True).params
    rules: list[Rule | None] = [None, Nothing(99), Nothing(99)]
    runner = ScriptedRunner(depth=depth)
    engine = make_engine(runner)
    for n, rule in enumerate(rules):
        engine.submit(Request(f"j{n}", 1, (0, 1, 2), params, n, constraint=rule))
    assert all(len(one.token_ids) == 25 for one in run(engine))
    drawing = [len(batch.draws) for batch in runner.batches]
    assert drawing == [len(rules)] * 25


class Noting(ScriptedRunner):
    """Notes what is called, in order."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def launch(self, batch: StepBatch) -> None:
        self.calls.append("launch")
        super().launch(batch)

    def draw(self, masks: IntArray) -> None:
        if len(masks):
            self.calls.append("draw")
        super().draw(masks)


def test_masks_are_made_after_the_forward_pass_was_launched() -> None:
    calls: list[str] = []

    class NotingRule(Rule):
        def mask(self, row: IntArray, /) -> None:
            calls.append("mask")
            super().mask(row)

    engine = make_engine(Noting(calls))
    request = make_request(rule=2, seed=3, max_tokens=1)
    engine.submit(Request("j", 1, request.prompt_ids, request.params, 3, constraint=NotingRule(2)))
    run(engine)
    assert calls == ["launch", "mask", "draw"]


class Nothing(Rule):
    """Allows everything for some tokens, then nothing."""

    def __init__(self, tokens: int) -> None:
        super().__init__(0)
        self.tokens = tokens

    def allowed(self, drawn: list[int]) -> list[int]:
        return [0, 1, 2] if len(drawn) < self.tokens else []


@pytest.mark.parametrize("depth", [1, 3])
def test_a_text_that_nothing_can_follow_fails_alone_and_says_so(depth: int) -> None:
    engine = make_engine(ScriptedRunner(depth=depth))
    params = make_request(max_tokens=20).params
    engine.submit(Request("stuck", 1, (0, 1, 2), params, 1, constraint=Nothing(4)))
    engine.submit(make_request("free", seed=1, max_tokens=20, ignore_eos=True))
    done = {one.job_id: one for one in run(engine)}
    assert done["free"].stop_reason is StopReason.LENGTH
    assert done["stuck"].stop_reason is StopReason.ERROR
    assert len(done["stuck"].token_ids) == 4
    assert "allows none" in (done["stuck"].error or "")
    assert engine.stats.free_pages == engine.stats.pages


class Raising(Rule):
    """Allows everything for some tokens, then fails at a mask, or at a token that it is given."""

    def __init__(self, error: Exception, *, masks: int = 99, tokens: int = 99) -> None:
        super().__init__(0)
        self.error, self.masks, self.tokens = error, masks, tokens

    def allowed(self, drawn: list[int]) -> list[int]:
        return [0, 1, 2]

    def mask(self, row: IntArray, /) -> None:
        self.masks -= 1
        row[0] = 7
        if self.masks < 0:
            raise self.error

    def accept(self, token_id: int, /) -> None:
        self.tokens -= 1
        if self.tokens < 0:
            raise self.error


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConstraintError("regex: too much for one step"), "regex: too much for one step"),
        (ZeroDivisionError("of its own"), "could not be followed: ZeroDivisionError: of its own"),
    ],
)
@pytest.mark.parametrize("when", [{"masks": 4}, {"tokens": 4}, {"masks": 0}, {"tokens": 0}])
def test_a_constraint_that_raises_fails_its_own_text_alone(
    depth: int, error: Exception, said: str, when: dict[str, int]
) -> None:
    engine = make_engine(ScriptedRunner(depth=depth))
    params = make_request(max_tokens=20).params
    engine.submit(Request("bad", 1, (0, 1, 2), params, 1, constraint=Raising(error, **when)))
    beside = [
        make_request("free", seed=1, max_tokens=20),
        make_request("held", seed=2, rule=5, max_tokens=20),
    ]
    for request in beside:
        engine.submit(request)
    done = {one.job_id: one for one in run(engine)}
    assert done["bad"].stop_reason is StopReason.ERROR and said in (done["bad"].error or "")
    assert len(done["bad"].token_ids) == max(when.values()) + ("tokens" in when)
    for request in beside:
        assert outcome(done[request.job_id]) == expected(request, 64)
    assert engine.stats.free_pages == engine.stats.pages


def test_a_constraint_that_does_not_take_saved_tokens_fails_its_own_text_alone() -> None:
    engine = make_engine(ScriptedRunner())
    bad = Raising(ConstraintError("foreign tokens"), tokens=2)
    engine.submit(
        Request("bad", 2, (0, 1, 2), make_request().params, 1, generated_ids=(0, 1, 2, 0), constraint=bad)
    )
    (done,) = run(engine)
    assert (done.stop_reason, done.error, done.token_ids) == (StopReason.ERROR, "foreign tokens", (0, 1, 2))
    assert engine.stats.free_pages == engine.stats.pages


def test_a_request_whose_constraint_nobody_has_made_is_not_generated_without_it() -> None:
    engine = make_engine(ScriptedRunner())
    asked = Constrained(ConstraintKind.REGEX, "a")
    engine.submit(replace(make_request("bad"), constrained=asked))
    (done,) = run(engine)
    assert done.stop_reason is StopReason.ERROR and "was not compiled" in (done.error or "")
    with pytest.raises(ConstraintError, match="regex: this engine compiles none"):
        engine.constraints.compile(asked).result()


def test_work_is_abandoned_in_order_where_the_draw_fails() -> None:
    class Failing(ScriptedRunner):
        def draw(self, masks: IntArray) -> None:
            if len(masks):
                raise RunnerError("scripted failure")
            super().draw(masks)

    engine = make_engine(Failing(depth=2))
    engine.submit(make_request("masked", rule=1))
    with pytest.raises(RunnerError, match="scripted failure"):
        run(engine)
    assert [one.job_id for one in engine.abandon()] == ["masked"]
    assert engine.stats.free_pages == engine.stats.pages
    engine.check_integrity()
