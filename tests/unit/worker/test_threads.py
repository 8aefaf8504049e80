"""Threads are watched: an exception that nobody expected ends the worker in order, with its reason."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.housekeeper import Housekeeper
from nightmill.worker.service.suspects import LOOK_SECONDS
from nightmill.worker.watched import describe, watched_thread
from tests.support.servers import wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, Gated, Pausing, enqueue
from tests.unit.worker.interrupted import make_suspects


@pytest.fixture
def housekeeping() -> Iterator[Callable[[Bench], Housekeeper]]:
    made: list[Housekeeper] = []

    def make(bench: Bench) -> Housekeeper:
        client = bench.client
        heart = Heart(bench.claims, client.settings.stale_seconds)
        made.append(Housekeeper(bench.service, bench.claims, heart, client.broker, client.settings, "model"))
        return made[-1]

    yield make
    for housekeeper in made:
        housekeeper.close()


def test_a_thread_that_breaks_says_why(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    thread = watched_thread("miller", lambda: [][0], reasons.append)
    thread.start()
    thread.join(120)
    assert reasons == ["its thread 'miller' failed: IndexError: list index out of range"]
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.CRITICAL, True)
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "chore", ["cancel_requests", "save", "beat", "running", "suspects_wait", "claim_suspects"]
)
def test_a_chore_that_breaks_ends_the_worker_and_frees_its_jobs(
    build: Callable[..., Bench],
    housekeeping: Callable[[Bench], Housekeeper],
    monkeypatch: pytest.MonkeyPatch,
    chore: str,
) -> None:
    runner = Pausing() if chore == "save" else Gated()  # there are tokens to save, and jobs that go on
    bench = build(runner, capacity=4)
    if chore == "save":
        monkeypatch.setattr(bench.service, "_save", lambda reports: [][0])
    else:
        monkeypatch.setattr(bench.claims, chore, lambda *arguments: [][0])
    if chore == "claim_suspects":
        make_suspects(bench.client, 2)
    bench.run(enqueue(bench.client, 4, max_tokens=150, ignore_eos=True))
    wait_until(bench.service.in_flight.keys)
    keeper = housekeeping(bench)
    if chore == "claim_suspects":
        runner.gate.set()
    keeper.start()
    wait_until(lambda: bench.fatal)
    assert bench.fatal[0] == "its thread 'housekeeper' failed: IndexError: list index out of range"
    assert bench.service.in_flight.keys() == []
    assert "running" not in bench.client.stats()["state"]
    runner.gate.set()


def test_suspects_run_before_the_first_message(
    build: Callable[..., Bench], housekeeping: Callable[[Bench], Housekeeper]
) -> None:
    bench = build(ScriptedRunner())
    suspects, others = make_suspects(bench.client, 2), enqueue(bench.client, 2, max_tokens=3)
    bench.service.in_flight.pause()  # as `Housekeeper.start` does, before Celery takes messages
    shard = bench.run(others)
    housekeeping(bench).start()
    shard.join(120)
    finished = bench.client.results([*suspects, *others], order="finished")
    begun = sorted(finished, key=lambda job: (job.started_at, job.id))
    assert {job.id for job in begun[:2]} == set(suspects)


def test_a_worker_is_shown_as_ready_before_its_first_job_begins(
    build: Callable[..., Bench],
    housekeeping: Callable[[Bench], Housekeeper],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = build(ScriptedRunner())
    claims, said, go_on = bench.claims, threading.Event(), threading.Event()
    shown: list[str] = []
    beat, claim = claims.beat, claims.claim_within

    def slow_beat(*arguments: Any) -> bool:
        said.set()
        assert go_on.wait(120)
        return beat(*arguments)

    def observed_claim(*wanted: Any) -> tuple[list[Claim], dict[str, int]]:
        shown.extend(worker.state for worker in bench.client.workers())
        return claim(*wanted)

    monkeypatch.setattr(claims, "beat", slow_beat)
    monkeypatch.setattr(claims, "claim_within", observed_claim)
    bench.service.in_flight.pause()  # as `Housekeeper.start` does, before Celery takes messages
    shard = bench.run(enqueue(bench.client, 2, max_tokens=3))
    housekeeping(bench).start()
    assert said.wait(120)
    shard.join(1.2 * LOOK_SECONDS)  # time in which a look for suspects would let it begin
    go_on.set()
    shard.join(120)
    assert bench.client.stats()["state"] == {"succeeded": 2}
    assert shown == [WorkerState.READY]


def test_a_database_that_is_away_at_the_start_keeps_no_job_waiting(
    build: Callable[..., Bench],
    housekeeping: Callable[[Bench], Housekeeper],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = build(ScriptedRunner())

    def away(models: object) -> bool:
        raise DatabaseUnreachableError

    monkeypatch.setattr(bench.claims, "suspects_wait", away)
    housekeeping(bench).start()
    bench.run(enqueue(bench.client, 2, max_tokens=3)).join(120)
    assert bench.client.stats()["state"] == {"succeeded": 2}
    assert bench.fatal == []
