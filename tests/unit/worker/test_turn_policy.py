"""Which of several models is loaded next, and when the loaded one gives way: the policy, without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.sql.loads import Queue
from nightmill.worker.service.turns.policy import (
    Loadable,
    Loaded,
    Rules,
    View,
    choose,
    give_way,
    ranked,
)

NOW = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
RULES = Rules(stay=timedelta(minutes=10))


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def queue(model: str | None, rows: int = 10, **said: object) -> Queue:
    return replace(Queue(model, rows, 0, ago(3600)), **said)  # type: ignore[arg-type]


def view(
    *queues: Queue, models: str = "ABC", load: float = 20.0, held: Mapping[str, int] | None = None
) -> View:
    return View(
        NOW, [Loadable(model, load) for model in models], {one.model: one for one in queues}, held or {}
    )


def loaded(model: str, seconds: float = 3600.0, *, idle: bool = False) -> Loaded:
    return Loaded(model, ago(seconds), idle)


def next_of(found: View, rules: Rules = RULES) -> str | None:
    choice = choose(found, rules)
    return None if choice is None else choice.model


def swap_of(found: View, now: Loaded, rules: Rules = RULES) -> str | None:
    choice = give_way(found, now, rules)
    return None if choice is None else choice.model


def test_the_next_is_found_by_priority_then_deadline_then_rows_then_age() -> None:
    soon, later = NOW + timedelta(hours=1), NOW + timedelta(hours=2)
    rest = queue("A", 10)
    assert next_of(view(rest, queue("B", 11))) == "B"
    assert next_of(view(rest, queue("B", 10, since=ago(3601)))) == "B"
    assert next_of(view(rest, queue("B", 1, deadline=later))) == "B"
    assert next_of(view(queue("A", deadline=later), queue("B", 1, deadline=soon))) == "B"
    assert next_of(view(queue("A", 10, deadline=soon), queue("B", 1, priority=1))) == "B"
    # A deadline that cannot be met any more is none.
    assert next_of(view(rest, queue("B", 1, deadline=NOW + timedelta(seconds=5)))) == "A"


def test_a_model_that_takes_long_to_load_needs_more_rows() -> None:
    found = view(queue("A", 10), queue("B", 50))
    assert next_of(found) == "B"
    assert next_of(replace(found, candidates=[Loadable("A", 10.0), Loadable("B", 60.0)])) == "A"


def test_rows_for_any_model_load_the_first_unless_any_worker_has_a_model() -> None:
    assert next_of(view(queue(None))) == "A"
    assert next_of(view(queue(None), queue("C", 1))) == "C"
    assert next_of(view(queue(None), held={"other": 8})) is None
    assert next_of(view()) is None


def test_a_queue_is_drained_before_a_swap_however_old_the_others_are() -> None:
    others = (queue("B", 100_000, since=ago(7200)), queue("C", 7, since=ago(9000)))
    assert swap_of(view(queue("A", 1), *others), loaded("A", 60.0)) is None
    assert swap_of(view(queue(None, 1), *others), loaded("A", 60.0)) is None  # any model: this one
    assert swap_of(view(*others), loaded("A", idle=False)) is None  # its last rows are being computed
    assert swap_of(view(*others), loaded("A", 1.0, idle=True)) == "B"


def test_a_row_that_has_just_come_swaps_after_as_long_as_a_load_takes() -> None:
    idle = loaded("A", idle=True)
    assert swap_of(view(queue("B", 1, since=ago(19))), idle) is None
    assert swap_of(view(queue("B", 1, since=ago(20))), idle) == "B"
    assert swap_of(view(queue("B", 1, since=ago(0), interactive=1)), idle) == "B"  # somebody waits for it


@pytest.mark.parametrize(("seconds", "swaps"), [(599.0, False), (600.0, True)])
def test_more_urgent_rows_wait_for_the_end_of_a_stay(seconds: float, swaps: bool) -> None:
    higher = view(queue("A"), queue("B", 1, priority=1))
    assert (swap_of(higher, loaded("A", seconds)) == "B") is swaps
    # Rows that came after the load keep it no longer than its stay from others, which waited before.
    came_later = view(queue("A", since=ago(30)), queue("B", since=ago(400)))
    assert (swap_of(came_later, loaded("A", seconds)) == "B") is swaps
    still_from_before = view(queue("A", since=ago(700)), queue("B", since=ago(800)))
    assert swap_of(still_from_before, loaded("A", seconds)) is None
    lower = view(queue("A", since=ago(30), priority=1), queue("B", since=ago(400)))
    assert swap_of(lower, loaded("A", seconds)) is None


def test_a_deadline_that_would_be_missed_swaps_at_once_and_one_that_is_earlier_here_stays() -> None:
    near = queue("B", 1, deadline=NOW + timedelta(minutes=9))
    assert swap_of(view(queue("A"), near), loaded("A", 60.0)) == "B"
    assert swap_of(view(queue("A"), near), loaded("A", 19.0)) is None  # it has only just been loaded
    assert swap_of(view(queue("A", deadline=NOW + timedelta(minutes=8)), near), loaded("A", 60.0)) is None
    assert swap_of(view(queue("A", priority=1), near), loaded("A", 60.0)) is None
    far = replace(near, deadline=NOW + timedelta(hours=3))
    assert swap_of(view(queue("A"), far), loaded("A", 60.0)) is None
    missed = replace(near, deadline=NOW + timedelta(seconds=10))
    assert swap_of(view(queue("A"), missed), loaded("A", 60.0)) is None


def test_interactive_jobs_swap_only_if_they_may() -> None:
    may = Rules(swap_for_interactive=True)
    found = view(queue("A", 1000, priority=9), queue("B", 1, interactive=1))
    assert swap_of(found, loaded("A", 60.0)) is None
    assert swap_of(found, loaded("A", 60.0), may) == "B"
    assert swap_of(found, loaded("A", 10.0), may) is None  # not again before the last load is worth anything
    assert next_of(found) == "A" and next_of(found, may) == "B"
    both = view(queue("A", 1000, interactive=2), queue("B", 1, interactive=1))
    assert swap_of(both, loaded("A", 60.0), may) is None


def test_two_workers_do_not_both_load_the_model_with_the_last_rows() -> None:
    held = {"A": 32}
    assert next_of(view(queue("A", 10), held=held)) is None
    assert next_of(view(queue("A", 128), held=held)) is None
    assert next_of(view(queue("A", 129), held=held)) == "A"
    # What nobody has loaded comes first, even with fewer rows.
    assert next_of(view(queue("A", 10_000), queue("B", 5), held=held)) == "B"
    assert swap_of(view(queue("A", 10), held=held), loaded("B", idle=True)) is None


def test_a_model_that_failed_is_left_alone_until_it_is_tried_again() -> None:
    found = view(queue("A", 10), queue("B", 5))
    wait = [Loadable("A", 20.0, NOW + timedelta(seconds=1)), Loadable("B", 20.0)]
    assert next_of(replace(found, candidates=wait)) == "B"
    again = [replace(wait[0], retry_at=NOW), wait[1]]
    assert next_of(replace(found, candidates=again)) == "B"  # the others come first
    assert next_of(View(NOW, again, {"A": queue("A")})) == "A"
    urgent = {"A": queue("A", priority=9), "B": queue("B")}
    assert swap_of(View(NOW, again, urgent), loaded("B")) is None
    assert swap_of(View(NOW, again, {"A": queue("A")}), loaded("B", idle=True)) == "A"
    assert next_of(View(NOW, wait, {None: queue(None)})) == "B"


class Night:
    """Workers that serve queues at a fixed speed, by the policy alone."""

    def __init__(self, rows: Mapping[str, int], workers: int = 1, *, slots: int = 8) -> None:
        self.rows = dict(rows)
        self.loads: list[tuple[int, str]] = []
        self._slots = slots
        self._now = NOW
        self._models: list[Loaded | None] = [None] * workers

    def play(self) -> None:
        for _ in range(10_000):
            if not any(self.rows.values()):
                return
            for worker in range(len(self._models)):
                self._turn(worker)
            self._now += timedelta(seconds=1)
        raise AssertionError("the night does not end")

    def _turn(self, worker: int) -> None:
        here = self._models[worker]
        if here is None:
            chosen = choose(self._view(worker), RULES)
        else:
            done = min(self._slots, self.rows[here.model])
            self.rows[here.model] -= done
            here = replace(here, idle=not done)
            chosen = give_way(self._view(worker), here, RULES)
        if chosen is not None:
            self.loads.append((worker, chosen.model))
            self._models[worker] = Loaded(chosen.model, self._now, idle=False)

    def _view(self, worker: int) -> View:
        queues = {model: queue(model, rows) for model, rows in self.rows.items() if rows}
        held: dict[str, int] = {}
        for other, here in enumerate(self._models):
            if other != worker and here is not None:
                held[here.model] = held.get(here.model, 0) + self._slots
        candidates = [Loadable(model, 20.0) for model in self.rows]
        return View(self._now, candidates, queues, held)


def test_rows_interleaved_a_b_a_c_load_each_model_once() -> None:
    night = Night({"A": 20_000, "B": 10_000, "C": 10_000})
    night.play()
    assert night.loads == [(0, "A"), (0, "B"), (0, "C")]


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=5), st.integers(1, 4))
def test_whatever_waits_is_served_and_no_worker_loads_a_model_twice(
    rows: Sequence[int], workers: int
) -> None:
    night = Night(dict(zip("ABCDE", rows, strict=False)), workers)
    night.play()
    assert len(night.loads) == len(set(night.loads))
    few = {model for model, count in zip("ABCDE", rows, strict=False) if count <= 4 * 8}
    assert all(sum(model == one for _, one in night.loads) <= 1 for model in few)


@given(st.permutations("ABC"), st.integers(0, 9), st.booleans())
def test_the_order_of_the_list_decides_nothing(models: Sequence[str], priority: int, held: bool) -> None:
    found = view(
        queue("A", 30), queue("B", 20, priority=priority), queue("C", 10), held={"A": 2} if held else {}
    )
    orders = [ranked(replace(found, candidates=[Loadable(model, 20.0) for model in some]), RULES)
              for some in (models, "ABC")]  # fmt: skip
    assert orders[0] == orders[1]
