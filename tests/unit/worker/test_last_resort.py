"""A worker that was told to end is gone in bounded time, whatever hangs."""

import threading

import pytest

from nightmill.worker.service import last_resort
from nightmill.worker.service.last_resort import LastResort
from tests.servers import wait_until


def test_a_worker_that_does_not_end_is_ended_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_resort, "_LOOK_SECONDS", 0.01)
    done: list[object] = []
    over = threading.Event()

    def end(code: int) -> None:
        done.append(code)
        over.set()

    monkeypatch.setattr(last_resort.os, "_exit", end)
    ordered = threading.Event()
    watched = LastResort(ordered.is_set, 0.1, lambda: done.append("engine killed"))
    watched.start()
    assert not over.wait(0.3)  # nobody told it to
    ordered.set()
    wait_until(over.is_set)
    assert done == ["engine killed", 1]
