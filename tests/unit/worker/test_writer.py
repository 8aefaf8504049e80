"""How results are grouped."""

import time
from collections.abc import Sequence

import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.sql.claims import Outcome
from nightmill.worker.service import writer as module
from nightmill.worker.service.writer import ResultWriter
from tests.support.servers import wait_until


def test_after_a_group_of_several_the_next_gathers_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACE_SECONDS", 2.0)
    groups: list[list[str]] = []

    def write(outcomes: Sequence[Outcome]) -> int:
        groups.append([outcome.job_id for outcome in outcomes])
        return len(outcomes)

    def put(*job_ids: str) -> None:
        for job_id in job_ids:
            writer._queue.put(Outcome(job_id, 1, StopReason.EOS, "", 1, 1))

    writer = ResultWriter(write, lambda outcomes: None, lambda outcome, reason: None, pytest.fail)
    put("alone")
    wait_until(lambda: len(groups) == 1)
    put("a", "b")  # a lone one before them holds nothing up
    wait_until(lambda: len(groups) == 2, timeout=1.0)
    put("c")
    time.sleep(0.2)
    put("d")
    wait_until(lambda: len(groups) == 3)
    put("e")
    writer.close()  # waits for nothing
    assert groups == [["alone"], ["a", "b"], ["c", "d"], ["e"]]
