"""The service in one process, on an engine (in a thread) whose runner does as the test says."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.service.shards import CLAIMS_AT_ONCE
from tests.support.servers import Clock, wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import PROMPT, Bench, Faulty, Gated, enqueue, these


def test_shard_returns_when_every_job_of_it_is_written(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    ids = enqueue(bench.client, 20, max_tokens=5)
    bench.service.run_shard(ids)
    assert {job.state for job in bench.client.results(ids, wait=False)} == {JobState.SUCCEEDED}
    assert len(list(bench.client.results(ids, wait=False))) == 20
    assert bench.service.in_flight.keys() == []
    bench.engine.check_integrity()
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_no_more_is_claimed_than_there_is_room_for(build: Callable[..., Bench]) -> None:
    runner = Gated()
    bench = build(runner, capacity=6)
    ids = enqueue(bench.client, 40, max_tokens=3)
    threads = [bench.run(ids[:20]), bench.run(ids[20:])]
    wait_until(lambda: len(bench.client.list_jobs(state="running", limit=100)) == 6)
    assert bench.service.in_flight.room == 0
    assert len(bench.client.list_jobs(state="queued", limit=100)) == 34
    runner.gate.set()
    for thread in threads:
        thread.join(120)
    assert bench.client.stats()["state"] == {"succeeded": 40}


def test_prompt_that_cannot_be_tokenised_fails_alone(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    bad = bench.client.enqueue("unspeakable")
    good = enqueue(bench.client, 3, max_tokens=3)
    bench.service.run_shard([good[0], bad, *good[1:]])
    failed = bench.client.get(bad)
    assert (failed.state, failed.stop_reason) == (JobState.FAILED, StopReason.ERROR)
    assert failed.error == "the template refuses"
    assert [entry["error"] for entry in failed.errors] == ["the template refuses"]
    assert {bench.client.get(job_id).state for job_id in good} == {JobState.SUCCEEDED}


def test_failing_engine_gives_its_jobs_to_other_workers_and_ends_the_process(
    build: Callable[..., Bench],
) -> None:
    runner = Faulty()
    bench = build(runner, capacity=4)
    runner.broken = True
    ids = enqueue(bench.client, 10, max_tokens=5)
    bench.service.run_shard(ids)
    assert bench.fatal == ["the engine failed: the arithmetic gave out"]
    jobs = bench.client.store.find(these(ids))
    assert {job.state for job in jobs} == {JobState.QUEUED}
    assert len([job for job in jobs if job.attempt]) == 4  # those that were claimed
    assert {(job.failures, len(job.errors)) for job in jobs} == {(0, 0)}  # each may be the cause
    healthy = build(ScriptedRunner(), name="b")
    healthy.suspects.look()
    healthy.service.run_shard(ids)
    assert bench.client.stats()["state"] == {"succeeded": 10}


def test_cancelled_job_frees_its_pages_and_keeps_its_text(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(script=[0, 1] * 90))
    # The scripted runner takes the seed for the length of the prompt.
    job_id = bench.client.enqueue("prompt", max_tokens=150, ignore_eos=True, seed=len(PROMPT))
    original, tokens_at_cancel = bench.engine.step, []

    def step() -> Any:
        done = original()
        if bench.engine.stats.generated_tokens == 10 and not tokens_at_cancel:
            tokens_at_cancel.append(10)
            bench.client.cancel(job_id)
            bench.service.poll_cancellations()
        return done

    bench.engine.step = step  # type: ignore[method-assign]
    bench.service.run_shard([job_id])
    job = bench.client.get(job_id)
    assert (job.state, job.stop_reason, job.completion_tokens) == (
        JobState.CANCELLED,
        StopReason.CANCELLED,
        10,
    )
    assert job.text == "ab" * 5
    bench.engine.check_integrity()
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_draining_finishes_what_it_can_and_hands_the_rest_back(build: Callable[..., Bench]) -> None:
    runner = Gated()
    bench = build(runner, capacity=4)
    ids = enqueue(bench.client, 9, max_tokens=3)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 4)
    bench.service.drain_seconds = 0.0
    drained = threading.Thread(target=bench.service.drain)
    drained.start()
    wait_until(lambda: bench.service.draining)
    runner.gate.set()
    drained.join(120)
    thread.join(120)
    jobs = bench.client.store.find(these(ids))
    assert all(job.state in (JobState.QUEUED, JobState.SUCCEEDED) for job in jobs)
    left = [job for job in jobs if job.state is JobState.QUEUED]
    assert len(left) >= 5 and all(job.failures == 0 for job in left)
    announced = [job_id for item in Sweep(bench.claims.database).unsent(100) for job_id in item.job_ids]
    assert sorted(announced) == sorted(job.id for job in left)


class SlowClaims:
    """Holds every claim of a bench back, committed, until it is let go."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed, self.let_go = threading.Event(), threading.Event()
        claim = bench.claims.claim_within

        def slow(*wanted: Any) -> Any:
            claims = claim(*wanted)
            self.committed.set()
            assert self.let_go.wait(240)
            return claims

        monkeypatch.setattr(bench.claims, "claim_within", slow)


def test_jobs_claimed_too_late_for_a_draining_worker_are_handed_back(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    slow = SlowClaims(bench, monkeypatch)
    ids = enqueue(bench.client, 3, max_tokens=3)
    thread = bench.run(ids)
    assert slow.committed.wait(120)
    bench.service.drain_seconds = 0.0
    drained = threading.Thread(target=bench.service.drain)
    drained.start()
    wait_until(lambda: bench.service.in_flight._ended)
    assert drained.is_alive()  # it signs off when nobody claims any more
    slow.let_go.set()
    for waiting in (drained, thread):
        waiting.join(120)
        assert not waiting.is_alive()
    jobs = bench.client.store.find(these(ids))
    assert {(job.state, job.failures) for job in jobs} == {(JobState.QUEUED, 0)}
    assert [item.job_ids for item in Sweep(bench.claims.database).unsent(100)] == [ids]


def test_a_shard_that_waits_for_its_turn_to_be_claimed_stays_queued_in_a_drain(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    slow = SlowClaims(bench, monkeypatch)
    ids = enqueue(bench.client, CLAIMS_AT_ONCE + 1, max_tokens=3)
    threads = [bench.run([job_id]) for job_id in ids]
    wait_until(lambda: len(bench.client.list_jobs(state="running")) == CLAIMS_AT_ONCE)
    wait_until(lambda: bench.service.in_flight._reserved[False] == len(ids))
    drained = threading.Thread(target=bench.service.drain)
    drained.start()
    wait_until(lambda: bench.service.in_flight._closed)
    slow.let_go.set()
    for waiting in (drained, *threads):
        waiting.join(120)
        assert not waiting.is_alive()
    assert bench.client.stats()["state"] == {"succeeded": CLAIMS_AT_ONCE, "queued": 1}
    (left,) = bench.client.list_jobs(state="queued")
    assert left.attempt == 0
    assert [item.job_ids for item in Sweep(bench.claims.database).unsent(100)] == [[left.id]]


def test_draining_waits_for_jobs_whose_claim_is_under_way(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    slow = SlowClaims(bench, monkeypatch)
    ids = enqueue(bench.client, 3, max_tokens=3)
    thread = bench.run(ids)
    assert slow.committed.wait(120)
    bench.service.drain_seconds = 60.0
    drained = threading.Thread(target=bench.service.drain)
    drained.start()
    wait_until(lambda: bench.service.in_flight._closed)
    slow.let_go.set()
    for waiting in (drained, thread):
        waiting.join(120)
    assert bench.client.stats()["state"] == {"succeeded": 3}


def test_the_engine_is_told_once_of_each_cancellation(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Gated()
    bench = build(runner)
    told: list[str] = []
    cancel = bench.service.engine.cancel
    monkeypatch.setattr(bench.service.engine, "cancel", lambda job_id: told.append(job_id) or cancel(job_id))
    first, second = enqueue(bench.client, 2, max_tokens=100, ignore_eos=True)
    assert bench.service.in_flight.reserve(2) == 2
    submitted, _ = bench.service._start([first, second], 2)
    for job_id in (first, second):
        bench.client.cancel(job_id)
        for _ in range(3):
            bench.service.poll_cancellations()
    assert told == [first, second]
    runner.gate.set()
    bench.service.in_flight.wait_for_end(submitted)
    assert bench.client.stats()["state"] == {"cancelled": 2}


def test_a_job_cancelled_before_the_engine_knows_it_is_cancelled_all_the_same(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Gated()
    bench = build(runner)
    (job_id,) = enqueue(bench.client, 1, max_tokens=100, ignore_eos=True)
    submit, submitted = bench.service.engine.submit, threading.Event()

    def cancelled_just_before(requests: Any) -> None:
        bench.client.cancel(job_id)
        bench.service.poll_cancellations()
        submit(requests)
        submitted.set()

    monkeypatch.setattr(bench.service.engine, "submit", cancelled_just_before)
    thread = bench.run([job_id])
    assert submitted.wait(120)
    bench.service.poll_cancellations()
    runner.gate.set()
    thread.join(120)
    assert bench.client.stats()["state"] == {"cancelled": 1}


def test_claims_that_the_worker_lost_sight_of_are_handed_back(
    build: Callable[..., Bench], clock: Clock
) -> None:
    bench = build(ScriptedRunner())
    ids = enqueue(bench.client, 2)
    assert len(bench.claims.claim(ids)) == 2  # as if the answer had been lost on the way
    bench.service.reconcile()
    assert bench.client.stats()["state"] == {"running": 2}  # the answer may still be under way
    clock.advance(60)
    bench.service.reconcile()
    assert bench.client.stats()["state"] == {"queued": 2}


def test_a_job_that_ends_while_the_database_is_asked_was_never_lost_sight_of(
    build: Callable[..., Bench],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Gated()
    bench = build(runner)
    ids = enqueue(bench.client, 1, max_tokens=4, ignore_eos=True)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 1)
    clock.advance(60)
    ask = bench.claims.running

    def ended_meanwhile() -> Any:
        running = ask()
        runner.gate.set()
        thread.join(120)
        return running

    monkeypatch.setattr(bench.claims, "running", ended_meanwhile)
    bench.service.reconcile()
    assert bench.client.stats()["state"] == {"succeeded": 1}
    assert "lost sight" not in caplog.text


def test_jobs_taken_by_another_worker_are_dropped(build: Callable[..., Bench], clock: Clock) -> None:
    runner = Gated()
    bench = build(runner)
    ids = enqueue(bench.client, 3, max_tokens=100, ignore_eos=True)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    clock.advance(3600)
    other = Claims(bench.client.database, "b" * 32)
    other.register("host", 2, "model", None)
    assert sorted(Sweep(other.database).rescue(timedelta(seconds=30))) == sorted(ids)
    assert [len(other.claim_suspects((None,), 10)) for _ in range(2)] == [2, 1]
    bench.service.reconcile()
    runner.gate.set()
    thread.join(120)
    assert {job.state for job in bench.client.store.find(these(ids))} == {JobState.RUNNING}
    assert {job.worker for job in bench.client.store.find(these(ids))} == {"b" * 32}
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_the_engine_goes_on_while_results_are_written(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner(), capacity=2)
    ids = enqueue(bench.client, 6)
    finish, written = bench.claims.finish, threading.Event()

    def slow(outcomes: Any) -> int:
        assert written.wait(120)
        return finish(outcomes)

    monkeypatch.setattr(bench.service._writer, "_write", slow)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == len(ids))
    assert bench.client.stats()["state"] == {"running": 6}
    written.set()
    thread.join(120)
    assert bench.client.stats()["state"] == {"succeeded": 6}
    assert bench.service.in_flight.room == 2


def test_results_wait_for_a_database_that_is_away(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    finish, failures = bench.claims.finish, []

    def away_twice(outcomes: Any) -> int:
        if len(failures) < 2:
            failures.append(1)
            raise DatabaseUnreachableError
        return finish(outcomes)

    monkeypatch.setattr(bench.service._writer, "_write", away_twice)
    ids = enqueue(bench.client, 3, max_tokens=3)
    bench.service.run_shard(ids)
    assert len(failures) == 2
    assert bench.client.stats()["state"] == {"succeeded": 3}
