"""The database hangs, or connections to it freeze: a worker goes on, and ends when it is told to."""

import signal
import subprocess
import time
from pathlib import Path

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.last_resort import END_SECONDS
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import WorkerProcess
from tests.integration.jobs.test_silent_database import through
from tests.support.freezing import Freeze, FreezingProxy, suspended
from tests.support.servers import REFERENCE, postgres_address, start_postgres, start_redis, wait_until

PATIENCE = 60.0
DRAIN = 1.0


def test_a_worker_outlives_frozen_connections_and_ends_while_its_database_hangs(tmp_path: Path) -> None:
    with start_redis(tmp_path / "redis") as redis, start_postgres() as postgres:
        settings = Settings(
            data_dir=tmp_path,
            broker_url=redis.url,
            database_url=postgres.create_database(),
            model=Path(demo_model()),
            reference=REFERENCE,
            drain_seconds=DRAIN,
        )
        with Client(settings) as client, FreezingProxy(postgres_address(postgres.admin_url)) as proxy:
            client.database.migrate()
            with Client(through(proxy, settings)) as far:
                worker = WorkerProcess(far, tmp_path / "log")
            try:
                worker.wait_until_ready()
                ids = client.enqueue_many(["Once"] * 200, max_tokens=8)
                wait_until(lambda: _succeeded(client) >= 20, PATIENCE)
                assert proxy.freeze(Freeze.ACKNOWLEDGED) > 0
                client.wait(ids, timeout=4 * PATIENCE)
                assert _succeeded(client) == len(ids)
                endless = client.enqueue("Once", max_tokens=400, ignore_eos=True)
                wait_until(lambda: client.get(endless).state is JobState.RUNNING, PATIENCE)
                with suspended(postgres.pid, children=True):
                    _ends(worker.popen)
            finally:
                worker.popen.kill()
                worker.close()


def _succeeded(client: Client) -> int:
    found: int = client.stats()["state"].get("succeeded", 0)
    return found


def _ends(process: "subprocess.Popen[bytes]") -> None:
    """Told so once, it ends, by itself or by force."""
    time.sleep(1.0)  # so that its threads wait for the database
    process.send_signal(signal.SIGTERM)
    process.wait(DRAIN + END_SECONDS + PATIENCE)
