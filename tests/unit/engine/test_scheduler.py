"""Admission, budget and preemption, planned step by step without a runner."""

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine import scheduler as scheduling
from nightmill.worker.engine.kv_cache import PagePool
from nightmill.worker.engine.plan import StepPlan
from nightmill.worker.engine.request import Request, Sequence, SequenceState
from nightmill.worker.engine.scheduler import Scheduler


def sequence(order: int, prompt: int, *, priority: int = 5, limit: int = 1000) -> Sequence:
    request = Request(f"j{order}", 1, (0,) * prompt, GenerationParams(), 0, None, priority)
    return Sequence(request, order, [0] * prompt, limit)


def scheduler(
    *sequences: Sequence, pages: int = 100, slots: int = 8, budget: int = 32, reserved: int = 0
) -> Scheduler:
    """The sequences above are all alike, so nothing is shared here; see test_sharing for that."""
    pool = PagePool(pages, 4)
    made = Scheduler(
        pool, max_sequences=slots, token_budget=budget, prefix_sharing=False, interactive_slots=reserved
    )
    for one in sequences:
        made.add(one)
    return made


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    decodes = [(sequence.request.job_id, sequence.computed, 1) for sequence in plan.decodes]
    return decodes + [(chunk.sequence.request.job_id, chunk.start, chunk.length) for chunk in plan.chunks]


def carry_out(made: Scheduler, plan: StepPlan) -> None:
    """What the engine does around a launch that is collected at once."""
    number = made._holders.collected + 1
    made.launched(plan, number)
    made.collected(number)
    for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]:
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(0)


def step(made: Scheduler) -> list[tuple[str, int, int]]:
    plan = made.plan()
    planned = shape(plan)
    carry_out(made, plan)
    made.check_integrity()
    return planned


def test_a_prompt_within_the_budget_is_one_chunk() -> None:
    made = scheduler(sequence(1, 20), sequence(2, 5))
    assert step(made) == [("j1", 0, 20), ("j2", 0, 5)]
    assert step(made) == [("j1", 20, 1), ("j2", 5, 1)]


def test_no_more_are_admitted_than_can_begin_and_a_better_one_does_not_wait_for_them() -> None:
    made = scheduler(*(sequence(order, 20) for order in range(1, 6)))
    plan = made.plan()
    assert [one.request.job_id for one in plan.admitted] == ["j1", "j2"]
    carry_out(made, plan)
    made.add(sequence(9, 5, priority=9))
    assert step(made) == [("j1", 20, 1), ("j9", 0, 5), ("j2", 12, 8), ("j3", 0, 18)]
    assert (made.running, made.waiting) == (4, 2)


def test_a_long_prompt_takes_as_few_chunks_as_the_budget_allows_and_decoding_goes_on() -> None:
    made = scheduler(sequence(1, 3), budget=10)
    assert step(made) == [("j1", 0, 3)]
    made.add(sequence(2, 20))
    assert step(made) == [("j1", 3, 1), ("j2", 0, 9)]
    assert step(made) == [("j1", 4, 1), ("j2", 9, 9)]
    assert step(made) == [("j1", 5, 1), ("j2", 18, 2)]
    assert step(made) == [("j1", 6, 1), ("j2", 20, 1)]


def test_neither_prefill_nor_decode_starves_when_all_slots_are_taken() -> None:
    made = scheduler(*(sequence(n, 1) for n in range(1, 4)), sequence(4, 3), slots=4, budget=4)
    assert step(made) == [("j1", 0, 1), ("j2", 0, 1), ("j3", 0, 1), ("j4", 0, 1)]
    assert step(made) == [("j1", 1, 1), ("j2", 1, 1), ("j3", 1, 1), ("j4", 1, 1)]
    assert step(made)[-1] == ("j4", 2, 1)


def test_priority_then_order_of_submission() -> None:
    made = scheduler(
        sequence(1, 2, priority=1), sequence(2, 2), sequence(3, 2, priority=9), sequence(4, 2), slots=3
    )
    assert [name for name, *_ in step(made)] == ["j3", "j2", "j4"]
    assert made.waiting == 1


def test_a_sequence_that_does_not_fit_is_not_overtaken() -> None:
    made = scheduler(sequence(1, 8), sequence(2, 30), sequence(3, 1), pages=8)
    assert [name for name, *_ in step(made)] == ["j1"]
    assert (made.running, made.waiting) == (1, 2)


def test_a_page_for_each_running_sequence_is_kept_back_at_admission() -> None:
    made = scheduler(sequence(1, 8), sequence(2, 8), sequence(3, 4), pages=6)
    assert [name for name, *_ in step(made)] == ["j1", "j2"]  # 4 of 6 pages; j3 needs 1 and 2 are kept back
    assert made.waiting == 1


def test_the_last_in_rank_gives_way_and_is_recomputed_as_one_prompt() -> None:
    first, last = sequence(1, 7), sequence(2, 7)
    made = scheduler(first, last, pages=5)
    assert step(made) == [("j1", 0, 7), ("j2", 0, 7)]
    assert step(made) == [("j1", 7, 1), ("j2", 7, 1)]
    plan = made.plan()  # both need a third page, one is left
    assert shape(plan) == [("j1", 8, 1)]
    assert plan.preempted == [last]
    assert (last.state, last.computed, len(last.tokens), last.slot) == (SequenceState.WAITING, 0, 9, None)
    carry_out(made, plan)
    made.finish(first)
    assert step(made) == [("j2", 0, 9)]
    assert made.preemptions == 1


def test_lower_priority_gives_way_before_later_submission() -> None:
    low, high = sequence(1, 7, priority=1), sequence(2, 7, priority=2)
    made = scheduler(low, high, pages=5)
    step(made)
    step(made)
    assert made.plan().preempted == [low]


def test_pages_of_a_sequence_in_flight_are_kept_until_its_launch_is_done() -> None:
    first, last = sequence(1, 7), sequence(2, 7)
    made = scheduler(first, last, pages=5)
    step(made)
    step(made)
    last.last_launch = 1000  # it is outstanding
    plan = made.plan()  # j1 takes the last page, j2 gives way
    assert (plan.preempted, shape(plan)) == ([last], [("j1", 8, 1)])
    carry_out(made, plan)
    assert last.held_pages
    assert last.slot is not None
    for _ in range(3):
        assert len(step(made)) == 1
    assert step(made) == []  # j1 waits for a page; nobody else has to go
    assert (first.state, made.preemptions) == (SequenceState.RUNNING, 1)
    last.last_launch = made._holders.collected
    assert step(made) == [("j1", 12, 1)]
    assert last.slot is None


def test_finishing_from_every_state_gives_everything_back() -> None:
    made = scheduler(sequence(1, 7), slots=1)
    waiting, running = sequence(2, 3), sequence(3, 3, priority=9)
    made.add(waiting)
    made.add(running)
    step(made)
    assert running.state is SequenceState.RUNNING
    made.finish(waiting)
    made.finish(running)
    made.check_integrity()
    assert step(made) == [("j1", 0, 7)]
    assert (made.running, made.waiting) == (1, 0)


def test_nothing_is_planned_past_the_length_limit() -> None:
    only = sequence(1, 3, limit=5)
    made = scheduler(only)
    assert [step(made), step(made), step(made)] == [[("j1", 0, 3)], [("j1", 3, 1)], []]


@pytest.mark.parametrize(("slots", "budget", "fault"), [(0, 8, "max_sequences"), (8, 7, "token budget of 7")])
def test_limits_that_contradict_each_other_are_refused(slots: int, budget: int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        scheduler(slots=slots, budget=budget)


def interactive(order: int, prompt: int) -> Sequence:
    request = Request(f"i{order}", 1, (0,) * prompt, GenerationParams(), 0, priority=10, interactive=True)
    return Sequence(request, order, [0] * prompt, 1000)


def test_slots_are_kept_for_interactive_sequences_which_may_have_any() -> None:
    made = scheduler(*(sequence(order, 4) for order in range(1, 6)), slots=4, reserved=1)
    step(made)
    assert (made.running, made.waiting) == (3, 2)
    for order in (10, 11):
        made.add(interactive(order, 4))
    assert step(made)[-1] == ("i10", 0, 4)
    assert (made.running, made.waiting) == (4, 3)
    made.finish(made._holders.running[-1])
    assert step(made)[-1] == ("i11", 0, 4)  # before j4, though the kept slot is taken
    for one in made._holders.running[:2]:
        assert one.request.interactive
        made.finish(one)
    step(made)
    assert (made.running, made.waiting) == (3, 1)


def test_an_interactive_sequence_is_in_the_next_step_however_many_wait() -> None:
    made = scheduler(*(sequence(order, 4) for order in range(1, 20_001)), slots=8, reserved=1)
    step(made)
    assert (made.running, made.waiting) == (7, 19_993)
    made.add(interactive(30_000, 4))
    assert step(made)[-1] == ("i30000", 0, 4)
    assert made.waiting == 19_993


def test_while_somebody_waits_steps_compute_few_tokens_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "INTERACTIVE_TOKENS", 10)
    monkeypatch.setattr(scheduling, "LINGER_STEPS", 2)
    made = scheduler(sequence(1, 60))
    assert step(made) == [("j1", 0, 32)]
    one = interactive(9, 4)
    made.add(one)
    assert step(made) == [("i9", 0, 4), ("j1", 32, 6)]
    made.finish(one)
    assert [step(made)[-1] for _ in range(3)] == [("j1", 38, 10), ("j1", 48, 10), ("j1", 58, 2)]
    made.add(sequence(2, 40))
    assert step(made) == [("j1", 60, 1), ("j2", 0, 31)]


def test_who_ranks_last_gives_way_to_an_interactive_sequence_and_nobody_takes_its_pages() -> None:
    first, last, urgent = sequence(1, 8), sequence(2, 8), interactive(9, 9)
    made = scheduler(first, last, pages=6, reserved=1)
    step(made)
    last.last_launch = 1000  # it is outstanding
    made.add(urgent)
    plan = made.plan()
    assert (plan.preempted, plan.empty) == ([last], True)  # of two free pages none is for j1
    assert made.plan().empty
    last.last_launch = made._holders.collected
    plan = made.plan()
    assert (plan.admitted, shape(plan)) == ([urgent], [("j1", 8, 1), ("i9", 0, 9)])
    carry_out(made, plan)
    made.check_integrity()
    assert made.preemptions == 1


def test_an_interactive_sequence_whose_pages_a_better_one_takes_in_the_same_step_is_not_admitted() -> None:
    first, second = interactive(1, 8), interactive(2, 8)
    made = scheduler(first, pages=4)
    step(made)
    made.add(second)  # there are two pages for it, of which the first one now needs one
    plan = made.plan()
    assert (plan.admitted, plan.preempted, shape(plan)) == ([], [second], [("i1", 8, 1)])
    carry_out(made, plan)
    made.check_integrity()
    made.finish(first)
    assert step(made) == [("i2", 0, 8)]
