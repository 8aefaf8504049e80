"""What `nightmill run` does about a worker that dies, and whose jobs it takes."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.commands import keeper as module
from nightmill.worker.commands.keeper import WorkerKeeper
from nightmill.worker.commands.process import WorkerProcess
from tests.integration.worker.conftest import on_sqlite
from tests.support.servers import wait_until

STUB = [sys.executable, str(Path(__file__).with_name("stub_worker.py"))]
MODEL = "nightmill-demo"


def ended(keeper: WorkerKeeper) -> bool:
    return keeper.own is not None and keeper.own.exit_code is not None


@on_sqlite
def test_a_worker_that_was_ready_and_died_between_two_looks_is_buried_and_replaced(
    jobs_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WorkerProcess", partial(WorkerProcess, command=STUB))
    monkeypatch.setenv("STUB_WORKER_DEATH", "ready 1")
    keeper = WorkerKeeper(jobs_client, MODEL)
    assert keeper.check(0) == "loading the model"
    first = keeper.own
    assert first is not None
    wait_until(lambda: ended(keeper))  # before anybody saw it ready
    monkeypatch.setenv("STUB_WORKER_DEATH", "starting 1")
    assert keeper.check(0) == "loading the model"
    buried = jobs_client.worker_store.get(first.id)
    assert buried is not None and buried.state == "lost"
    assert keeper.own is not None and keeper.own.id != first.id
    wait_until(lambda: ended(keeper))
    with pytest.raises(NightmillError, match="the worker did not start"):  # that one never served
        keeper.check(0)
    keeper.close()


@on_sqlite
def test_only_the_worker_that_was_written_down_is_buried_whatever_its_process_id(jobs_client: Client) -> None:
    keeper = WorkerKeeper(jobs_client, MODEL)
    ids = list(jobs_client.enqueue_many(["prompt"] * 2))
    for worker_id, job_id in zip(("a" * 32, "b" * 32), ids, strict=True):
        claims = Claims(jobs_client.database, worker_id)
        claims.register("host", 1, MODEL, None)  # as all are in containers of one image
        claims.beat(WorkerState.READY)
        assert len(claims.claim([job_id])) == 1
    keeper._write("a" * 32)  # by a run that was killed
    assert keeper.check(0) == ""  # the other serves the model
    assert [jobs_client.get(job_id).state for job_id in ids] == [JobState.QUEUED, JobState.RUNNING]
    keeper._write(json.dumps({"pid": 1, "host": "host"}))  # by an earlier version
    keeper.check(0)
    assert jobs_client.get(ids[1]).state is JobState.RUNNING
    keeper.close()
