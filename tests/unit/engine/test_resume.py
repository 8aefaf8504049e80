"""Requests that go on from the tokens of an earlier attempt: in all that can be seen as if undisturbed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import StopReason
from tests.unit.engine.by_definition import VOCAB, expected
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

SEEDS = st.integers(0, 2**63 - 1)
STOPS = st.sampled_from([(), ("ab",), ("é", "ST"), ("a ", "ba", "€b"), ("STOP",)])


@given(
    seed=SEEDS,
    stop=STOPS,
    max_tokens=st.integers(1, 30),
    ignore_eos=st.booleans(),
    depth=st.integers(1, 3),
    pages=st.sampled_from([6, 40]),
)
def test_interrupted_after_any_token_the_answer_is_the_same(
    seed: int, stop: tuple[str, ...], max_tokens: int, ignore_eos: bool, depth: int, pages: int
) -> None:
    params = {"stop": stop, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
    context = min(64, pages * 4)
    whole = expected(make_request(seed=seed, **params), context)
    for known in range(len(whole[0]) + 1):
        engine = make_engine(ScriptedRunner(depth=depth, kv_pages=pages))
        engine.submit(make_request(seed=seed, generated=whole[0][:known], **params))
        (completion,) = run(engine)
        assert (completion.token_ids, completion.text, completion.stop_reason) == whole
        assert (completion.prompt_tokens, completion.completion_tokens) == (3, len(whole[0]))
        stats = engine.stats
        assert (stats.resumed_tokens, stats.generated_tokens) == (known, len(whole[0]) - known)


@given(seed=SEEDS, stop=STOPS, steps=st.lists(st.integers(1, 7), max_size=8), depth=st.integers(1, 3))
def test_interrupted_again_and_again_the_answer_is_the_same(
    seed: int, stop: tuple[str, ...], steps: list[int], depth: int
) -> None:
    params = {"stop": stop, "max_tokens": 40}
    known: tuple[int, ...] = ()
    for count in steps:
        engine = make_engine(ScriptedRunner(depth=depth))
        engine.submit(make_request(seed=seed, generated=known, **params))
        done = [completion for _ in range(count) for completion in engine.step()]
        if done:
            assert (done[0].token_ids, done[0].text, done[0].stop_reason) == expected(
                make_request(seed=seed, **params), 64
            )
            return
        (partial,) = engine.abandon()
        assert partial.token_ids[: len(known)] == known
        known = partial.token_ids
    engine = make_engine(ScriptedRunner(depth=depth))
    engine.submit(make_request(seed=seed, generated=known, **params))
    (completion,) = run(engine)
    whole = expected(make_request(seed=seed, **params), 64)
    assert (completion.token_ids, completion.text, completion.stop_reason) == whole


def test_tokens_known_before_are_computed_again_as_many_at_once_as_slots_are_free() -> None:
    runner = ScriptedRunner(script=[0] * 99)
    engine = make_engine(runner)
    engine.submit(make_request(seed=3, max_tokens=12, generated=(0,) * 10))
    (completion,) = run(engine)
    # The prompt's 3 as one chunk and 7 drawn tokens fill the 8 slots; then the other 3; then one drawn here.
    assert [(len(batch.tokens), batch.drawn) for batch in runner.batches] == [(10, 7), (3, 3), (1, 1)]
    assert (completion.text, completion.stop_reason) == ("a" * 12, StopReason.LENGTH)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_that_the_model_lacks_are_refused(token: int) -> None:
    engine = make_engine(ScriptedRunner())
    engine.submit(make_request(generated=(0, token)))
    (completion,) = run(engine)
    assert completion.stop_reason is StopReason.ERROR
    assert completion.error is not None and "an earlier attempt began" in completion.error
