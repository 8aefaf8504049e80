"""How results are grouped."""

import threading
import time
from collections.abc import Sequence

import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.sql.claims import Outcome
from nightmill.worker.service import writer as module
from nightmill.worker.service.writer import ResultWriter
from tests.support.servers import wait_until


def test_after_a_group_of_several_the_next_gathers_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACE_SECONDS", 600.0)  # longer than any wait here
    groups: list[list[str]] = []
    two_are_there = threading.Event()

    def write(outcomes: Sequence[Outcome]) -> int:
        groups.append([outcome.job_id for outcome in outcomes])
        two_are_there.wait(240)
        return len(outcomes)

    def put(*job_ids: str) -> None:
        for job_id in job_ids:
            writer._queue.put(Outcome(job_id, 1, StopReason.EOS, "", 1, 1))

    writer = ResultWriter(write, lambda outcomes: None, lambda outcome, reason: None, pytest.fail)
    put("alone")
    wait_until(lambda: len(groups) == 1)
    put("a", "b")  # a lone one before them holds nothing up
    two_are_there.set()
    wait_until(lambda: len(groups) == 2)
    put("c")
    time.sleep(0.2)  # many times as long as others linger
    put("d")
    wait_until(writer._queue.empty)
    assert groups == [["alone"], ["a", "b"]]
    writer.close()  # waits for nothing
    assert groups[2:] == [["c", "d"]]
