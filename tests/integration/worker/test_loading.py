"""A worker that loads a large model is alive: it beats, says how far it is, and may be stopped."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.commands.keeper import WorkerKeeper
from nightmill.worker.commands.process import WorkerProcess
from tests.integration.worker.conftest import on_sqlite
from tests.integration.worker.slow_worker import SLOW_WORKER
from tests.support.servers import wait_until

PATIENCE = 120.0


@pytest.mark.slow  # tests/unit/worker/test_heart.py and test_loading.py hold its parts
@on_sqlite
def test_a_slow_load_is_seen_outlasts_the_stale_time_and_can_be_stopped(
    jobs_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_WORKER_GATE", str(tmp_path / "gate"))
    settings = jobs_client.settings
    stale = timedelta(seconds=settings.stale_seconds)

    def reading(worker: WorkerProcess) -> bool:
        return worker.ready or re.search(r"^loading the model: \d+% of 0.0 GB$", worker.progress) is not None

    worker = WorkerProcess(jobs_client, tmp_path / "slow.log", command=SLOW_WORKER)
    try:
        wait_until(lambda: reading(worker), PATIENCE)
        first = jobs_client.worker_store.get(worker.id)
        assert first is not None and first.state == "starting" and first.pid == worker.popen.pid

        def older() -> bool:
            row = jobs_client.worker_store.get(worker.id)
            return row is not None and row.heartbeat_at - first.started_at > 2 * stale

        wait_until(older, PATIENCE)
        assert Sweep(jobs_client.database).rescue(stale) == []
        keeper = WorkerKeeper(jobs_client, first.model)
        assert keeper.check(0) == "" and keeper.own is None  # none beside it
        keeper.close()
        (tmp_path / "gate").touch()
        worker.wait_until_ready()
        served = jobs_client.worker_store.get(worker.id)
        assert served is not None and (served.state, served.detail) == ("ready", None)
    finally:
        worker.close()
    (tmp_path / "gate").unlink()
    stopped = WorkerProcess(jobs_client, tmp_path / "stopped.log", command=SLOW_WORKER)
    wait_until(lambda: reading(stopped), PATIENCE)
    stopped.close()  # SIGTERM, and waits
    assert stopped.exit_code == 0
    assert jobs_client.worker_store.get(stopped.id) is None
    with pytest.raises(NightmillError, match="the worker did not start"):
        stopped.wait_until_ready()
