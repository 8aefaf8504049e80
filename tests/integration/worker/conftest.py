"""A worker's fixtures: quick heartbeats, and processes that are gone when a test is over."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import WORKER_COMMAND, running_worker
from tests.support import instant_worker, paced_worker
from tests.support.servers import REFERENCE

SLOW, QUICK = paced_worker.COMMAND, instant_worker.COMMAND
"""Workers that do no arithmetic: one whose jobs are to be interrupted, and one that ends what it is given."""

StartWorker = Callable[..., AbstractContextManager[Popen[bytes]]]

# Every start of a worker takes seconds. What SQL decides (who claims, gives back, fences, expires) is tried
# on both databases without workers, by tests/integration/jobs; where processes are looked at, one is enough.
on_sqlite = pytest.mark.parametrize("server_settings", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("server_settings", ["postgresql"], indirect=True)


@pytest.fixture
def quick(server_settings: Settings) -> Settings:
    """Settings on which a dead worker is noticed after three seconds, and a lost message after two.

    On a busy machine a live one is not taken for dead.
    """
    return server_settings.model_copy(
        update={
            "model": Path(os.environ.get("NIGHTMILL_TEST_MODEL") or demo_model()),
            "reference": REFERENCE,
            "heartbeat_seconds": 0.4,
            "stale_seconds": 3.0,
            "resend_seconds": 2.0,
            "drain_seconds": 20.0,
        }
    )


@pytest.fixture
def jobs_client(quick: Settings) -> Iterator[Client]:
    """A client on the quick settings."""
    with Client(quick) as client:
        yield client


@pytest.fixture
def start_worker(jobs_client: Client, tmp_path: Path) -> StartWorker:
    """Start a worker process and wait until it takes jobs: `with start_worker("a", ...) as process`.

    command: SLOW or QUICK where what it writes plays no part; on a GPU it is a worker like any other.
    """

    def start(
        name: str, *arguments: str, command: Sequence[str] = WORKER_COMMAND, **changes: Any
    ) -> AbstractContextManager[Popen[bytes]]:
        changed = jobs_client.settings.model_copy(update=changes)
        client = Client(changed) if changes else jobs_client
        chosen = command if REFERENCE else WORKER_COMMAND
        return running_worker(client, tmp_path / f"{name}.log", list(arguments), chosen)

    return start
