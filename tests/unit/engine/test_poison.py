"""A sequence whose logits are not numbers fails alone, at once; whoever had its pages is computed again."""

from collections.abc import Callable

import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.request import Completion, Request
from tests.unit.engine.by_definition import EOS, expected, next_token, text_of
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

POISON = 9
SYSTEM = (0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2)  # three pages of four tokens


def prompts(guilty: Callable[[int], bool], count: int = 12) -> list[Request]:
    """All begin alike; the guilty have the poison in the chunk that computes the common beginning, too."""
    return [
        make_request(
            f"j{n}", (*SYSTEM, n % 7, *((POISON,) if guilty(n) else ()), n % 5), seed=n, max_tokens=8,
            stop="a " if n % 3 else (),
        )
        for n in range(count)
    ]  # fmt: skip


def check(done: list[Completion], requests: list[Request]) -> int:
    """Each has the answer it has by itself, errors included; returns how many failed."""
    by_id = {one.job_id: one for one in done}
    assert len(by_id) == len(done) == len(requests)
    for request in requests:
        one = by_id[request.job_id]
        assert (one.token_ids, one.text, one.stop_reason) == expected(request, 64, POISON)
    return sum(one.stop_reason is StopReason.ERROR for one in done)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("blocks", [14, 200])  # 14: sequences give way to each other
@pytest.mark.parametrize("guilty", [lambda n: n == 0, lambda n: n == 5, lambda n: n % 2 == 0, lambda n: True])
def test_the_guilty_fail_and_nobody_else(
    depth: int, sharing: bool, blocks: int, guilty: Callable[[int], bool]
) -> None:
    requests = prompts(guilty)
    engine = make_engine(ScriptedRunner(kv_pages=blocks, depth=depth, poison=POISON), prefix_sharing=sharing)
    for request in requests:
        engine.submit(request)
    assert check(run(engine), requests) >= sum(guilty(n) for n in range(12))
    assert engine.stats.free_pages == blocks
    again = prompts(lambda n: False)  # finds nothing spoilt
    for request in again:
        engine.submit(request)
    check(run(engine), again)


def test_the_message_says_what_to_try_and_the_answer_so_far_is_kept() -> None:
    prompt, seed = (0, 1, 2), 1
    known = [*prompt]
    while (token := next_token(seed, known)) != EOS:
        known.append(token)
    drawn = known[3:]
    assert len(set(drawn)) > 3
    poison = next(token for place, token in enumerate(drawn) if place > 2 and token not in known[: 3 + place])
    engine = make_engine(ScriptedRunner(poison=poison, depth=3))
    engine.submit(make_request(prompt=prompt, seed=seed))
    (done,) = run(engine)
    kept = drawn[: drawn.index(poison) + 1]
    assert (done.stop_reason, done.token_ids, done.text) == (StopReason.ERROR, tuple(kept), text_of(kept))
    assert done.error is not None
    assert "not a number" in done.error
    assert "--dtype bf16" in done.error


def test_who_computed_all_of_its_pages_fails_at_once() -> None:
    runner = ScriptedRunner(poison=POISON)
    engine = make_engine(runner)
    engine.submit(make_request(prompt=(*SYSTEM, POISON)))
    (done,) = engine.step()
    assert done.stop_reason is StopReason.ERROR
    assert len(runner.batches) == 1


def test_who_had_pages_of_others_is_computed_once_more_alone() -> None:
    """Both for those that are to blame and for those that are not; then the beginning is shared again."""
    runner = ScriptedRunner(poison=POISON, kv_pages=100, depth=2)
    engine = make_engine(runner, token_budget=64)
    guilty, innocent, later = (
        make_request("guilty", (*SYSTEM, POISON), seed=1, max_tokens=4),
        make_request("innocent", (*SYSTEM, 4), seed=2, max_tokens=4, ignore_eos=True),
        make_request("later", (*SYSTEM, 5), seed=3, max_tokens=4, ignore_eos=True),
    )
    engine.submit(guilty)
    engine.submit(innocent)
    done = run(engine)
    assert check(done, [guilty, innocent]) == 1
    assert engine.stats.shared_tokens == 12  # which were of no use
    assert engine.stats.prompt_tokens == 13 + 1 + 13
    before = engine.stats.prompt_tokens
    for request in (later, make_request("last", (*SYSTEM, 5), seed=4, max_tokens=1)):
        engine.submit(request)
    check([one for one in run(engine) if one.job_id == "later"], [later])
    assert engine.stats.prompt_tokens == before + 13 + 1


@pytest.mark.parametrize("depth", [1, 3])
def test_a_job_that_goes_on_from_saved_tokens_fails_again_alone(depth: int) -> None:
    engine = make_engine(ScriptedRunner(poison=POISON, depth=depth))
    begun = make_request("begun", (*SYSTEM, 3), seed=1, generated=(4, POISON, 2), max_tokens=9)
    other = make_request("other", (*SYSTEM, 3), seed=2, max_tokens=9)
    for request in (begun, other):
        engine.submit(request)
    done = {one.job_id: one for one in run(engine)}
    assert (done["begun"].stop_reason, done["begun"].token_ids) == (StopReason.ERROR, (4, POISON, 2))
    check([done["other"]], [other])
