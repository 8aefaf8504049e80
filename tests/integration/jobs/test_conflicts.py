"""Transactions that meet: locks in one order, and another try for those that lose. Clocks that are set."""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pytest
from sqlalchemy import event, text, update

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseBusyError
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.support.interleaving import before, wait_until_one_is_blocked
from tests.support.servers import Clock

STALE = timedelta(seconds=30)


@pytest.fixture
def postgres_client(postgres_settings: Settings, clock: Clock) -> Iterator[Client]:
    """A client on PostgreSQL, where transactions run side by side."""
    with Client(postgres_settings, clock=clock) as made:
        yield made


def test_rescuing_two_workers_and_cancelling_their_batch_do_not_wait_in_a_circle(
    postgres_client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has the second job: the cancellation holds the first one, and waits for the second."""
    monkeypatch.setattr("nightmill.jobs.sql.retrying.RETRY_SECONDS", 0.0)  # a deadlock would be an error
    first, second = postgres_client.enqueue_many(["prompt"] * 2, batch="b")
    for worker, job_id in (("a" * 32, second), ("b" * 32, first)):
        claims = Claims(postgres_client.database, worker)
        claims.register("host", 1, "model", None)
        claims.claim([job_id])
    clock.advance(60)
    cancelling: list[Future[tuple[int, int]]] = []
    with Client(postgres_client.settings, clock=clock) as other, ThreadPoolExecutor(1) as pool:

        def cancel() -> None:
            cancelling.append(pool.submit(other.cancel_batch, "b"))
            wait_until_one_is_blocked(other.database)

        with before(postgres_client.database, "UPDATE jobs SET", cancel):
            Sweep(postgres_client.database).rescue(STALE)
        cancelling[0].result(120)
    assert postgres_client.stats("b")["state"] == {"cancelled": 2}
    assert {worker.state for worker in postgres_client.workers()} == {"lost"}


def test_of_two_transactions_in_a_deadlock_the_one_that_loses_is_run_again(postgres_client: Client) -> None:
    ids = list(postgres_client.enqueue_many(["prompt"] * 2))
    both_hold_one = threading.Barrier(2)
    attempts: list[int] = []

    @retried
    def change(order: list[str], priority: int) -> None:
        attempts.append(priority)
        with postgres_client.database.write() as connection:
            for job_id in order:
                connection.execute(update(JobRow).where(JobRow.id == job_id).values(priority=priority))
                if attempts.count(priority) == 1 and job_id == order[0]:
                    both_hold_one.wait(120)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(change, ids, 1), pool.submit(change, ids[::-1], 2)]:
            done.result(240)
    assert len(attempts) == 3
    assert len({job.priority for job in postgres_client.list_jobs()}) == 1, "the last one changed both"


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
def test_what_postgresql_says_may_be_tried_again_is(postgres_client: Client, state: str) -> None:
    attempts: list[str] = []

    @retried
    def write() -> None:
        attempts.append(state)
        with postgres_client.database.write() as connection:
            if len(attempts) == 1:
                fail = f"DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '{state}'; END $$"
                connection.execute(text(fail))

    write()
    assert len(attempts) == 2


def test_a_sqlite_that_another_program_has_locked_is_tried_again(
    sqlite_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = sqlite_client.database
    database.ensure_schema()
    event.listen(database.engine, "checkout", lambda own, *_: own.execute("PRAGMA busy_timeout = 0"))
    holder = sqlite3.connect(str(database.engine.url.database), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            holder.execute("ROLLBACK")

    monkeypatch.setattr("nightmill.jobs.sql.retrying.time.sleep", pause)
    assert sqlite_client.get(sqlite_client.enqueue("prompt")).prompt == "prompt"
    assert len(pauses) == 2
    holder.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("nightmill.jobs.sql.retrying.RETRY_SECONDS", 0.0)
    with pytest.raises(DatabaseBusyError, match="is busy: database is locked"):
        sqlite_client.enqueue("prompt")
    holder.close()


# -- clocks --------------------------------------------------------------------------------------


def set_clock(monkeypatch: pytest.MonkeyPatch, step: timedelta) -> None:
    """Set the clock of this host, as the database's border sees it."""

    class Stepped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + step

    monkeypatch.setattr("nightmill.jobs.sql.database.datetime", Stepped)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_host_whose_clock_is_set_takes_no_jobs_from_live_workers(
    server_settings: Settings, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """On SQLite the database's clock is set with the host's; PostgreSQL has its own."""
    with Client(server_settings) as client:
        job_id = client.enqueue("prompt")
        claims = Claims(client.database, "a" * 32)
        claims.register("host", 1, "model", None)
        assert claims.claim([job_id])
        sweep = Sweep(client.database)
        assert sweep.rescue(STALE) == []
        told = client.database.now()
        set_clock(monkeypatch, timedelta(hours=hours))
        assert sweep.rescue(STALE) == []
        assert client.get(job_id).state == "running"
        if not client.database.is_sqlite:
            assert abs(client.database.now() - told) < timedelta(minutes=1)
        assert claims.beat(WorkerState.READY), "the worker must not hear that it was given up"


def test_postgresql_judges_heartbeats_by_its_own_clock(
    postgres_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who beats nor who judges brings a time along."""
    database = Database(postgres_settings)
    monkeypatch.setattr(Database, "now", lambda self: datetime.fromisoformat("2001-01-01T00:00:00+00:00"))
    live, silent = Claims(database, "a" * 32), Claims(database, "b" * 32)
    for claims in (live, silent):
        claims.register("host", 1, "model", None)
        assert claims.beat(WorkerState.READY)
    with database.write() as connection:
        connection.execute(
            text("UPDATE workers SET heartbeat_at = heartbeat_at - interval '1 minute' WHERE id LIKE 'b%'")
        )
    Sweep(database).rescue(STALE)
    assert (live.beat(WorkerState.READY), silent.beat(WorkerState.READY)) == (True, False)
    database.close()
