"""The broker goes away under a running worker: nothing accepted is lost, and work goes on by itself."""

from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.messages.announcing import DeliveryDelayedWarning
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support.servers import REFERENCE, RedisServer, wait_until

PATIENCE = 120.0


def through(redis_server: RedisServer, settings: Settings, *, resend_seconds: float) -> Settings:
    """A worker of the bundled model, with messages by that server."""
    chosen = {"broker_url": redis_server.url, "model": demo_model(), "reference": REFERENCE}
    return settings.model_copy(update=chosen | {"heartbeat_seconds": 0.2, "resend_seconds": resend_seconds})


@pytest.mark.slow  # the campaign kills Redis under workers, too
def test_worker_outlives_its_broker(
    sqlite_settings: Settings, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Restarted with what it held, and empty."""
    settings = through(redis_server, sqlite_settings, resend_seconds=2.0)
    log = tmp_path / "worker.log"
    with Client(settings) as client, running_worker(client, log, ["--max-sequences", "4"]) as process:
        before = client.enqueue("Count from 1 to 3", max_tokens=2)
        client.wait(before, timeout=PATIENCE)
        ids = [before]
        for keeps_its_data in (True, False):
            ids += client.enqueue_many(["Write a haiku about rain"] * 12, max_tokens=100, ignore_eos=True)
            wait_until(lambda: client.list_jobs(state=JobState.RUNNING), PATIENCE)
            if not keeps_its_data:
                redis_server.flush()
            redis_server.stop()
            with pytest.warns(DeliveryDelayedWarning, match="1 job is kept in the database"):
                without = client.enqueue("Count from 1 to 3", max_tokens=2)
            assert client.get(without).state is JobState.QUEUED
            redis_server.start()
            ids += [without, client.enqueue("Count from 1 to 3", max_tokens=2)]
            client.wait(ids, timeout=PATIENCE)
        assert process.poll() is None, log.read_text()
        assert len({worker.id for worker in client.workers()}) == 1
    assert "DeprecationWarning" not in log.read_text()
    finished = list(client.results(ids, wait=False))
    assert {job.state for job in finished} == {JobState.SUCCEEDED}
    assert {job.attempt for job in finished} == {1}


@pytest.mark.slow
def test_worker_wakes_while_its_broker_is_away(
    sqlite_settings: Settings, redis_server: RedisServer, tmp_path: Path
) -> None:
    """So it does when it loads another model: it is the same start."""
    settings = through(redis_server, sqlite_settings, resend_seconds=0.5)
    log = tmp_path / "worker.log"
    with Client(settings) as client, running_worker(client, log, ["--idle-seconds", "1"]) as process:
        wait_until(lambda: client.workers()[0].state is WorkerState.SLEEPING, PATIENCE)
        redis_server.stop()
        with pytest.warns(DeliveryDelayedWarning):
            job_id = client.enqueue("Count from 1 to 3", max_tokens=2)
        wait_until(
            lambda: process.poll() is not None or "ready: " in log.read_text().partition("waking up")[2],
            PATIENCE,
        )
        assert process.poll() is None
        redis_server.start()
        client.wait(job_id, timeout=PATIENCE)
        assert client.get(job_id).state is JobState.SUCCEEDED
        assert process.poll() is None, log.read_text()
        assert len({worker.id for worker in client.workers()}) == 1
