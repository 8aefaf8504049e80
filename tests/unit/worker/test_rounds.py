"""A thread that hangs in the middle of a round is noticed, and one that is left behind is named."""

import logging
import threading

import pytest

from nightmill.worker import watched
from nightmill.worker.watched import Rounds, end_threads
from tests.support.servers import wait_until


def test_a_round_that_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_LOOK_SECONDS", 0.01)
    over, failures = threading.Event(), list[str]()
    rounds = Rounds(0.05, over, failures.append)
    rounds.start()
    with rounds.one("sweep"):
        wait_until(lambda: failures)
    assert failures == ["its chore 'sweep' has not ended for 0 s"]


def test_many_short_rounds_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_LOOK_SECONDS", 0.01)
    over, failures = threading.Event(), list[str]()
    rounds = Rounds(60.0, over, failures.append)
    rounds.start()
    for _ in range(20):
        with rounds.one("sweep"):
            over.wait(0.01)
    over.set()
    assert failures == []


def test_a_thread_that_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    stuck = threading.Thread(target=release.wait, name="stuck", daemon=True)
    stuck.start()
    with caplog.at_level(logging.ERROR):
        end_threads([stuck], 0.05)
    release.set()
    assert "the thread 'stuck' does not end" in caplog.text
