"""After the database's clock was set back, what lies in the future is not fresh for as long."""

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql import database
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.files import FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow, WorkerRow
from tests.support.servers import Clock

STALE = timedelta(seconds=30)
DAY = 86_400.0


def _worker(client: Client, name: str = "dead") -> Claims:
    claims = Claims(client.database, name)
    claims.register("host", 1, "demo", None)
    claims.beat(WorkerState.READY)
    return claims


def test_a_dead_worker_serves_no_longer_than_another(client: Client, clock: Clock) -> None:
    _worker(client)
    clock.advance(-DAY)
    assert len(client.worker_store.serving()) == 1  # it may be about to beat
    clock.advance(client.settings.stale_seconds + 1)
    assert client.worker_store.serving() == []


def test_a_live_worker_beats_on(client: Client, clock: Clock) -> None:
    claims = _worker(client)
    clock.advance(-DAY)
    for _ in range(10):
        assert len(client.worker_store.serving()) == 1
        clock.advance(client.settings.stale_seconds / 2)
        claims.beat(WorkerState.READY)
        assert Sweep(client.database).rescue(STALE) == []
    assert client.worker_store.serving()[0].state is WorkerState.READY


def test_the_jobs_of_a_dead_worker_are_rescued(client: Client, clock: Clock) -> None:
    job_id = client.enqueue("a")
    _worker(client).claim([job_id])
    clock.advance(-DAY)
    sweep = Sweep(client.database)
    assert sweep.rescue(STALE) == []
    clock.advance(STALE.total_seconds() + 1)
    assert sweep.rescue(STALE) == [job_id]
    assert client.get(job_id).state is JobState.QUEUED


@pytest.mark.parametrize("model", [None, "demo"])
def test_a_lost_message_is_sent_again(client: Client, clock: Clock, model: str | None) -> None:
    ids = [client.enqueue("a", model=model, priority=priority) for priority in (0, 9)]
    ids.append(client.enqueue("a", model=model, interactive=True))
    clock.advance(-DAY)
    sweep, age = Sweep(client.database), timedelta(seconds=60)
    assert sweep.unanswered(model, age, 10) == []
    clock.advance(61)
    again = sweep.unanswered(model, age, 10)
    assert sorted(job_id for one in again for job_id in one.job_ids) == sorted(ids)


def test_times_by_postgresqls_own_clock_are_settled(postgres_settings: Settings) -> None:
    with Client(postgres_settings) as client:
        _worker(client)
        job_id = client.enqueue("a")
        ahead = client.database.now() + timedelta(hours=1)
        with client.database.write() as connection:
            connection.execute(update(WorkerRow).values(heartbeat_at=ahead))
            connection.execute(update(JobRow).values(sent_at=ahead))
        assert len(client.worker_store.serving()) == 1
        assert Sweep(client.database).unanswered(None, timedelta(0), 0) == []
        with client.database.read() as connection:
            beat: datetime = connection.execute(select(WorkerRow.heartbeat_at)).scalar_one()
            query = select(JobRow.sent_at).where(JobRow.id == job_id)
            sent: datetime | None = connection.execute(query).scalar_one()
        assert sent is not None
        assert max(beat, sent) < ahead - timedelta(minutes=30)


def test_a_process_counts_on_from_where_postgresqls_clock_is_now(
    postgres_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(postgres_settings) as client:
        right = client.database.now()
        monkeypatch.setattr(
            client.database, "_server_time", (right + timedelta(hours=1), database._elapsed())
        )
        assert client.database.now() > right + timedelta(
            minutes=59
        )  # as if the clock had been set back since
        Sweep(client.database).rescue(STALE)
        assert client.database.now() < right + timedelta(minutes=30)


def test_a_servers_claim_on_a_batch_lasts_no_longer_than_set(client: Client, clock: Clock) -> None:
    store = HttpBatchStore(client.database)
    batch = HttpBatch("1" * 32, None, "0" * 32, clock())
    FileStore(client.database).add(StoredFile("0" * 32, None, "batch", "x", 1, clock()), 1)
    store.add(batch)
    assert store.claim(batch, "dead", STALE)
    assert not store.claim(batch, "other", STALE)
    clock.advance(-DAY)
    assert store.claim(batch, "other", STALE)
    assert not store.claim(batch, "dead", STALE)
