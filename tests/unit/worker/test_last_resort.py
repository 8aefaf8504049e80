"""A worker that was told to end is gone in bounded time, whatever hangs."""

import threading

import pytest
from celery.worker import state as celery_state

from nightmill.jobs.base import last_resort
from nightmill.jobs.base.last_resort import LastResort
from nightmill.worker.service import celery_flags
from tests.support.servers import wait_until


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


@pytest.mark.parametrize("flag", ["should_stop", "should_terminate"])
@pytest.mark.parametrize(
    ("value", "told"), [(None, False), (False, False), (0, True), (True, True), (1, True)]
)
def test_an_exit_code_of_0_is_an_order_to_end(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: object, told: bool
) -> None:
    monkeypatch.setattr(celery_state, "should_stop", None)
    monkeypatch.setattr(celery_state, "should_terminate", None)
    monkeypatch.setattr(celery_state, flag, value)  # SIGTERM sets should_stop to 0
    assert celery_flags.told_to_end() is told
