"""Sequences with the same prefix: computed once, waited for within bounds, the answers as without sharing."""

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.request import Completion, Request, Sequence
from nightmill.worker.engine.scheduler import Scheduler
from nightmill.worker.engine.sharing import GROUP_TOKENS, GROUP_WINDOW, PrefixGroups
from nightmill.worker.engine.stats import EngineStats
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run
from tests.unit.engine.test_scheduler import carry_out, shape, step

SYSTEM = tuple(n % 14 for n in range(40))  # ten pages of four tokens


def sequence(order: int, prompt: tuple[int, ...], *, priority: int = 5) -> Sequence:
    request = Request(f"j{order}", 1, prompt, GenerationParams(), 0, None, priority)
    return Sequence(request, order, list(prompt), 1000)


def scheduler(*sequences: Sequence, pages: int = 100, slots: int = 8, budget: int = 100) -> Scheduler:
    made = Scheduler(PagePool(pages, 4), max_sequences=slots, token_budget=budget)
    for one in sequences:
        made.add(one)
    return made


def prompts_alike(count: int) -> list[Request]:
    return [
        make_request(f"j{n}", (*SYSTEM, n % 14, n % 3), seed=n, max_tokens=6, ignore_eos=True)
        for n in range(count)
    ]


def answer(requests: list[Request], sharing: bool, **options: int) -> tuple[list[Completion], EngineStats]:
    sizes = {"kv_pages": 400, "slots": 32} | options
    engine = make_engine(ScriptedRunner(**sizes), token_budget=64, prefix_sharing=sharing)
    for request in requests:
        engine.submit(request)
    done = {completion.job_id: completion for completion in run(engine)}
    return [done[request.job_id] for request in requests], engine.stats


@pytest.mark.parametrize("depth", [1, 3])
def test_a_prefix_that_arrives_many_times_at_once_is_computed_once(depth: int) -> None:
    requests = prompts_alike(30)
    with_sharing, shared = answer(requests, True, depth=depth)
    without, alone = answer(requests, False, depth=depth)
    assert with_sharing == without
    assert [(one.token_ids, one.text) for one in without] == [expected(one, 64)[:2] for one in requests]
    assert alone.prompt_tokens == 30 * 42
    assert shared.prompt_tokens == 40 + 30 * 2
    assert shared.shared_tokens == 29 * 40
    assert alone.shared_tokens == 0
    assert sorted(one.cached_tokens for one in with_sharing) == [0] + [40] * 29
    assert {one.cached_tokens for one in without} == {0}


@pytest.mark.parametrize("depth", [1, 3])
def test_with_states_the_first_of_many_leaves_a_snapshot_where_they_part(depth: int) -> None:
    requests = prompts_alike(30)
    with_sharing, shared = answer(requests, True, depth=depth, grid=8, snapshots=1)
    without, alone = answer(requests, True, depth=depth, grid=8)
    assert with_sharing == without
    assert [(one.token_ids, one.text) for one in without] == [expected(one, 64)[:2] for one in requests]
    assert alone.prompt_tokens == 30 * 42 and alone.shared_tokens == 0
    assert shared.prompt_tokens == 40 + 30 * 2
    assert shared.shared_tokens == 29 * 40


def test_with_states_the_second_who_comes_late_leaves_a_snapshot_for_the_third() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=60, grid=8, snapshots=3))
    computed = []
    for request in [*prompts_alike(3), make_request("k", (*SYSTEM[:21], 7, 7), max_tokens=1)]:
        before = engine.stats.prompt_tokens
        engine.submit(request)
        run(engine)
        computed.append(engine.stats.prompt_tokens - before)
    assert computed == [42, 42, 2, 23]  # the last one parts at 16, where no state is
    assert engine.stats.free_pages == engine.stats.pages


def test_snapshots_make_room_for_others_the_least_recently_used_first() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=200, grid=8, snapshots=2))
    prefixes = [tuple((n + start) % 14 for n in range(16)) for start in range(3)]

    def computed(prefix: tuple[int, ...], own: int) -> int:
        before = engine.stats.prompt_tokens
        engine.submit(make_request("j", (*prefix, own), max_tokens=1))
        run(engine)
        return engine.stats.prompt_tokens - before

    for prefix in prefixes[:2]:
        assert [computed(prefix, own) for own in range(3)] == [17, 17, 1]
    assert computed(prefixes[0], 3) == 1  # used later than the other
    assert [computed(prefixes[2], own) for own in range(3)] == [17, 17, 1]
    assert computed(prefixes[0], 4) == 1
    assert computed(prefixes[1], 4) == 17


def test_a_snapshot_goes_with_its_page() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=16, grid=8, snapshots=1))
    prefix = SYSTEM[:16]
    computed = []
    for prompt in [
        *((*prefix, own) for own in range(3)),
        tuple([5] * 60),
        *((*prefix, own) for own in range(3)),
    ]:
        before = engine.stats.prompt_tokens
        engine.submit(make_request("j", prompt, max_tokens=1))
        run(engine)
        computed.append(engine.stats.prompt_tokens - before)
    assert computed == [17, 17, 1, 60, 17, 17, 1]


def test_a_prefix_whose_owners_have_left_is_found_again() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=40))
    for request in prompts_alike(3):
        engine.submit(request)
        run(engine)
    assert engine.stats.shared_tokens == 2 * 40
    assert engine.stats.free_pages == engine.stats.pages


def test_pages_are_evicted_when_their_memory_is_needed_the_least_recently_used_first() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=16))
    other = tuple(reversed(SYSTEM))

    def shared_by(prompt: tuple[int, ...]) -> int:
        before = engine.stats.shared_tokens
        engine.submit(make_request("j", prompt, max_tokens=1))
        run(engine)
        return engine.stats.shared_tokens - before

    assert shared_by((*SYSTEM, 1)) == 0
    assert shared_by((*SYSTEM, 2)) == 40
    assert shared_by((*other, 1)) == 0  # takes the five pages that are empty, and six of the first prompt's
    assert shared_by((*SYSTEM, 3)) == 20  # the beginning was evicted last
    assert engine.stats.free_pages == 16


def test_at_least_the_last_token_is_computed() -> None:
    engine = make_engine(ScriptedRunner())
    for n in range(2):
        request = make_request(f"j{n}", SYSTEM, seed=n, max_tokens=6)
        engine.submit(request)
        (completion,) = run(engine)
        assert completion.token_ids == expected(request, 64)[0]
    assert engine.stats.shared_tokens == 36  # the last of ten pages is computed again


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    requests = [make_request(f"j{n}", (n,) * 12, seed=n, max_tokens=30, ignore_eos=True) for n in range(4)]
    with_sharing, shared = answer(requests, True, kv_pages=24, slots=4)
    without, alone = answer(requests, False, kv_pages=24, slots=4)
    assert with_sharing == without
    assert min(shared.preemptions, alone.preemptions) > 0
    assert shared.shared_tokens > 0
    assert shared.prompt_tokens < alone.prompt_tokens
    assert {one.cached_tokens for one in with_sharing} == {0}  # it had computed them itself


def test_pages_of_its_answer_are_found_again_too() -> None:
    first, last = sequence(1, (1,) * 7), sequence(2, (2,) * 7)
    made = scheduler(first, last, pages=10)
    while not (plan := made.plan()).preempted:
        carry_out(made, plan)
    assert (plan.preempted, len(last.tokens)) == ([last], 21)
    made.finish(first)
    assert step(made) == [
        ("j2", 16, 5)
    ]  # of its five full pages, one of them of its prompt, j1 took the last


def test_who_follows_keeps_slot_and_pages_from_those_below() -> None:
    leader, follower, stranger = sequence(1, (*SYSTEM, 1)), sequence(2, (*SYSTEM, 2)), sequence(3, (9,) * 5)
    made = scheduler(leader, follower, stranger, slots=2)
    assert step(made) == [("j1", 0, 41)]  # the second slot is the follower's
    assert step(made) == [("j1", 41, 1), ("j2", 40, 1)]
    made = scheduler(sequence(1, (*SYSTEM, 1)), sequence(2, (*SYSTEM, 2)), sequence(3, (9,) * 5), slots=3)
    assert step(made) == [("j1", 0, 41), ("j3", 0, 5)]  # one is left for the stranger
    pages = 11 + 1 + 2 + 2  # prompts, and one kept back for each that runs
    made = scheduler(
        sequence(1, (*SYSTEM, 1)), sequence(2, (*SYSTEM, 2)), sequence(3, (9,) * 5), pages=pages - 1
    )
    assert step(made) == [("j1", 0, 41)]  # the pages do not suffice for the stranger too


def test_a_follower_waits_while_the_prefix_is_computed_in_pieces() -> None:
    made = scheduler(sequence(1, (*SYSTEM, 1)), sequence(2, SYSTEM[:20] + (2,) * 9), budget=12)
    assert [step(made) for _ in range(3)] == [
        [("j1", 0, 12)],
        [("j1", 12, 12)],  # now the five pages in common are there
        [("j1", 24, 12)],
    ]
    assert step(made) == [("j1", 36, 5), ("j2", 20, 7)]


def test_nobody_waits_for_one_who_ranks_lower() -> None:
    low, high = sequence(1, (*SYSTEM, 1), priority=1), sequence(2, (*SYSTEM, 2), priority=9)
    made = scheduler(low, budget=20)
    assert step(made) == [("j1", 0, 20)]
    made.add(high)
    assert step(made) == [("j2", 20, 20)]  # what is there is used all the same
    made.add(sequence(3, (*SYSTEM, 3), priority=8))
    assert step(made) == [("j2", 40, 1), ("j3", 40, 1), ("j1", 20, 18)]
    for _ in range(5):
        step(made)


@pytest.mark.parametrize("leaves", ["finish", "preempt"])
def test_when_the_leader_leaves_a_follower_computes_the_rest(leaves: str) -> None:
    leader, follower = sequence(1, (*SYSTEM, 1)), sequence(2, (*SYSTEM, 2))
    made = scheduler(leader, follower, budget=20)
    assert step(made) == [("j1", 0, 20)]
    if leaves == "finish":
        made.finish(leader)
        assert step(made) == [("j2", 20, 20)]
    else:
        made._wait_again(leader)
        assert step(made) == [("j1", 20, 20)]  # it comes back first, and leads again
        assert follower.slot is None
    made.check_integrity()


def test_a_job_in_the_middle_of_its_answer_shares_its_prompt_too() -> None:
    engine = make_engine(ScriptedRunner())
    request = make_request("first", SYSTEM, seed=3, max_tokens=20, ignore_eos=True)
    engine.submit(request)
    run(engine)
    answer_ids = expected(request, 64)[0]
    again = make_request("again", SYSTEM, seed=3, max_tokens=20, ignore_eos=True, generated=answer_ids[:7])
    engine.submit(again)
    (completion,) = run(engine)
    assert completion.token_ids == answer_ids
    assert engine.stats.shared_tokens == 40


def test_without_sharing_nothing_is_kept() -> None:
    engine = make_engine(ScriptedRunner(), prefix_sharing=False)
    engine.submit(make_request("j", SYSTEM))
    run(engine)
    assert engine._pool.kept() == set()


def test_audit_notices_a_page_that_holds_other_tokens_and_one_that_is_waited_for_in_vain() -> None:
    one = sequence(1, (*SYSTEM, 1))
    made = scheduler(one, budget=20)
    step(made)
    one.tokens[3] += 1
    with pytest.raises(CacheIntegrityError, match="other pages than the tree says"):
        made.check_integrity()
    one.tokens[3] -= 1
    made.check_integrity()
    one.promise = None
    with pytest.raises(CacheIntegrityError, match="waited for in vain"):
        made.check_integrity()


def test_requests_with_equal_beginnings_stand_next_to_each_other() -> None:
    first, second = (1,) * (GROUP_TOKENS + 1), (2,) * (GROUP_TOKENS + 1)
    engine = make_engine(ScriptedRunner(slots=2, kv_pages=100), context_length=200)
    for number, prompt in enumerate([first, second] * 4):
        engine.submit(make_request(f"j{number}", (*prompt, number), seed=number, max_tokens=1))
    finished = [int(completion.job_id[1:]) for completion in run(engine)]
    assert finished == [0, 2, 4, 6, 1, 3, 5, 7]


def test_no_request_is_overtaken_by_more_than_a_window_for_the_sake_of_groups() -> None:
    groups = PrefixGroups()
    alike = (1,) * (GROUP_TOKENS + 1)
    places = [groups.place(alike, order) for order in range(3 * GROUP_WINDOW)]
    assert places == [order // GROUP_WINDOW * GROUP_WINDOW for order in range(3 * GROUP_WINDOW)]
    assert groups.place((1,) * GROUP_TOKENS, 5000) == 5000  # too short to be worth a group
    assert len(groups._groups) == 0  # the old ones are forgotten


def test_priority_goes_before_groups() -> None:
    alike = (1,) * (GROUP_TOKENS + 1)
    engine = make_engine(ScriptedRunner(slots=1, kv_pages=100), context_length=200)
    engine.submit(make_request("first", alike, max_tokens=1))
    engine.submit(make_request("other", (2,) * 9, max_tokens=1))
    engine.submit(make_request("same group", alike, max_tokens=1))
    engine.submit(make_request("urgent", (3,) * 9, max_tokens=1, priority=9))
    assert [done.job_id for done in run(engine)] == ["urgent", "first", "same group", "other"]


def test_plan_and_launch_are_told_apart() -> None:
    """Pages are found only once the launch that fills them is queued, not when it is planned."""
    made = scheduler(sequence(1, (*SYSTEM, 1)))
    plan = made.plan()
    late = sequence(2, (*SYSTEM, 2))
    made.add(late)
    assert shape(made.plan()) == [("j1", 0, 41)]  # planned again: it was not launched
    assert late.slot is None
    carry_out(made, plan)
    assert step(made) == [("j1", 41, 1), ("j2", 40, 1)]
