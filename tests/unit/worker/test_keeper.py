"""What keeps a worker alive starts it again as often as it takes to find who kills it, and then gives up."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.commands import keeper
from nightmill.worker.commands.keeper import WorkerKeeper


class Dying:
    """A worker process that becomes ready, and has ended when it is looked at again."""

    started = 0

    def __init__(self, client: Client, log: Path, *arguments: Any, **options: Any) -> None:
        type(self).started += 1
        self.log, self.id, self.progress = log, options.get("worker_id", "0" * 32), "loading the model"
        self.popen = SimpleNamespace(pid=1)
        self.ready = self.served = True
        self.looked_at = 0

    @property
    def exit_code(self) -> int | None:
        self.looked_at += 1
        return None if self.looked_at == 1 else 1

    def rows(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def kept(sqlite_client: Client, monkeypatch: pytest.MonkeyPatch) -> WorkerKeeper:
    monkeypatch.setattr(Dying, "started", 0)
    monkeypatch.setattr(keeper, "WorkerProcess", Dying)
    return WorkerKeeper(sqlite_client, "model")


def test_a_worker_that_only_dies_is_given_up_with_a_reason(kept: WorkerKeeper) -> None:
    with pytest.raises(NightmillError) as caught:
        for _ in range(1000):
            kept.check(done=5)
    assert Dying.started == 20
    said = str(caught.value)
    assert said.startswith(
        "the worker has died 20 times in a row, without a row done in between; the last time"
    )
    assert "exit code 1" in said and str(kept.log) in said and "the same command goes on" in said


def test_a_worker_that_dies_often_is_started_again_while_rows_get_done(kept: WorkerKeeper) -> None:
    for number in range(200):
        kept.check(done=number // 30)
    assert Dying.started > 60


@pytest.mark.parametrize(
    ("asked", "serves"),  # NumPy here, GPU 0 here, GPU 1 on another host
    [
        ({}, (True, True, True)),
        ({"gpu": 0}, (False, True, False)),
        ({"gpu": 1}, (False, False, False)),
        ({"reference": True}, (True, False, False)),
    ],
)
def test_a_worker_serves_who_asks_for_its_device_only(
    asked: dict[str, Any], serves: tuple[bool, ...], sqlite_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "WorkerProcess", Dying)
    here = socket.gethostname()
    settings = sqlite_client.settings.model_copy(update=asked)
    monkeypatch.setattr(sqlite_client, "settings", settings)
    for number, (host, gpu) in enumerate([(here, None), (here, "GPU 0"), ("elsewhere", "GPU 1")]):
        there = Claims(sqlite_client.database, f"{number}" * 32)
        there.register(host, 1, "model", gpu)
        there.beat(WorkerState.READY)
        kept = WorkerKeeper(sqlite_client, "model")
        kept.check(done=0)
        assert (kept.own is None) is serves[number]
        kept.close()
        there.withdraw()
