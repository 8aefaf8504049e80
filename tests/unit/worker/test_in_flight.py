"""Waiting for the jobs of a shard."""

import threading
from collections.abc import Sequence

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.assembly.sizes import capacity, interactive_slots
from nightmill.worker.service.in_flight import MOST_UNWRITTEN, InFlight, JobKey

FIRST: list[JobKey] = [(f"first-{number}", 1) for number in range(3)]
SECOND: list[JobKey] = [(f"second-{number}", 1) for number in range(50)]


@pytest.fixture
def in_flight() -> InFlight:
    jobs = InFlight(100)
    for keys in (FIRST, SECOND):
        claims = [Claim(*key, "", None, GenerationParams(), 5, None) for key in keys]
        jobs.fill(jobs.reserve(len(keys)), claims)
    return jobs


def waiting(jobs: InFlight, keys: Sequence[JobKey]) -> threading.Thread:
    thread = threading.Thread(target=jobs.wait_for_end, args=(keys,), daemon=True)
    thread.start()
    while thread.is_alive() and not all(key in jobs._awaited for key in keys):
        pass
    return thread


def test_whoever_waits_for_a_job_goes_on_at_the_last_of_his(in_flight: InFlight) -> None:
    threads = [waiting(in_flight, FIRST), waiting(in_flight, [FIRST[0]]), waiting(in_flight, FIRST)]
    in_flight.remove([FIRST[0], SECOND[0]])
    threads[1].join(120)
    assert [thread.is_alive() for thread in threads] == [True, False, True]
    in_flight.remove(FIRST)  # one of them for the second time
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    in_flight.wait_for_end(FIRST)
    assert in_flight._awaited == {}


def test_results_of_other_shards_wake_nobody(in_flight: InFlight) -> None:
    """Dozens of threads wait, and each that wakes takes the interpreter from whoever claims or writes."""
    threads = [waiting(in_flight, FIRST), waiting(in_flight, SECOND)]
    assert not in_flight._changed._waiters  # type: ignore[attr-defined]
    in_flight.remove(SECOND)
    threads[1].join(120)
    assert [thread.is_alive() for thread in threads] == [True, False]
    in_flight.remove(FIRST)
    threads[0].join(120)
    assert not threads[0].is_alive()


def test_an_engine_that_has_fewer_slots_than_asked_for_gets_no_more_jobs() -> None:
    """As where memory has no room for the states of all; interactive jobs have a share of what there is."""
    running = 57
    assert (capacity(running), interactive_slots(running), interactive_slots(1)) == (85, 3, 0)
    jobs = InFlight(3072, reserved_slots=128)
    jobs.resize(capacity(running), interactive_slots(running))
    assert jobs.reserve(1000) == 85
    assert jobs.reserve(1000, interactive=True) == 3


def claims_of(keys: Sequence[JobKey], answers: int = 1) -> list[Claim]:
    params = GenerationParams(n=answers)
    return [Claim(*key, "", None, params, 5, None) for key in keys]


def test_a_job_that_waits_to_be_written_takes_no_place_but_is_in_flight() -> None:
    jobs, keys = InFlight(8, reserved_slots=1), [(f"job-{number}", 1) for number in range(3)]
    jobs.fill(jobs.reserve(2), claims_of(keys[:2], answers=3))
    jobs.fill(jobs.reserve(1, interactive=True), claims_of(keys[2:]), interactive=True)
    assert (jobs.room, jobs.room_for(True)) == (2, 2)
    jobs.answered(keys[0])
    jobs.answered(keys[0])
    jobs.answered(("another's", 1))
    assert (jobs.room, jobs.room_for(True)) == (5, 5)
    jobs.answered(keys[2])
    assert (jobs.room, jobs.room_for(True)) == (5, 6)
    assert set(jobs.keys()) == set(keys) and not jobs.idle
    for key in keys:  # written: that frees nothing twice
        jobs.remove([key])
    assert (jobs.room, jobs.room_for(True), jobs.idle) == (8, 9, True)


def test_results_that_nobody_writes_end_the_claims() -> None:
    jobs = InFlight(4)
    claimed = 0
    while room := jobs.room:
        keys = [(f"job-{claimed + number}", 1) for number in range(room)]
        claimed += room
        jobs.fill(jobs.reserve(room), claims_of(keys))
        for key in keys:
            jobs.answered(key)
    assert claimed == MOST_UNWRITTEN + 4
    jobs.remove([(f"job-{number}", 1) for number in range(MOST_UNWRITTEN)])
    assert jobs.room == 4


def test_whoever_waits_for_room_is_woken_by_answers() -> None:
    jobs, keys = InFlight(8), [(f"job-{number}", 1) for number in range(8)]
    jobs.fill(jobs.reserve(8), claims_of(keys))
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(jobs.reserve(8)), daemon=True)
    thread.start()
    while not jobs._changed._waiters:  # type: ignore[attr-defined]
        pass
    jobs.answered(keys[0])
    assert jobs._changed._waiters  # type: ignore[attr-defined]  # a claim for one place costs as much as for several
    jobs.answered(keys[1])
    thread.join(120)
    assert taken == [2]
