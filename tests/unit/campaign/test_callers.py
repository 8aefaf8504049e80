"""What the campaign makes of processes that do not end, of servers' answers, and of what batches hold."""

import json
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from tests.campaign import limits, members
from tests.campaign.fleet import Fleet
from tests.campaign.http_caller import HttpCaller, expected_of, http_item
from tests.campaign.http_traffic import HttpBatch, HttpTraffic
from tests.campaign.ledger import Ledger
from tests.campaign.promptness import Timing, judge_time
from tests.campaign.report import Report
from tests.support.servers import wait_until

pytestmark = pytest.mark.heavy

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
ORDERLY = STUBBORN.replace("signal.SIG_IGN", "lambda *_: exit()")
OBEDIENT = "import time; print('up', flush=True); "


def _fleet(home: Path, report: Report) -> Fleet:
    world: Any = SimpleNamespace(
        home=home, ports=[], environment={}, hung_since=lambda when: False, in_turn=()
    )
    return Fleet(world, 1, report, [])


@pytest.mark.parametrize(("program", "found"), [(STUBBORN, ["never-ends"]), (OBEDIENT, [])])
def test_a_worker_that_ignores_sigterm_is_a_violation_and_one_that_ends_is_none(
    program: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "COMMAND", (sys.executable, "-c", program + "time.sleep(300)"))
    monkeypatch.setitem(limits.ENDS, "worker", 1.0)
    monkeypatch.setattr(limits, "MARGIN", 1.0 if found else 60.0)
    report = Report(1)
    with _fleet(tmp_path, report) as fleet:
        (worker,) = fleet.workers
        wait_until(lambda: worker.log.exists() and "up" in worker.log.read_text())
        assert fleet.do("terminate", fleet.workers, "Redis")
        process = worker.process
        assert process is not None
        wait_until(lambda: process.poll() is not None, 90.0)
        wait_until(lambda: worker.process is not process, 90.0)
        assert process.returncode == (-signal.SIGKILL if found else -signal.SIGTERM)
        timing = Timing((), fleet.endings, fleet.stops, (), time.monotonic())
    assert [violation.kind for violation in judge_time(timing)] == found
    assert [ending.hung for ending in fleet.endings] == ["Redis"]


def test_the_time_that_a_worker_was_stopped_is_noted_and_it_ends_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "COMMAND", (sys.executable, "-c", ORDERLY + "time.sleep(300)"))
    with _fleet(tmp_path, Report(1)) as fleet:
        (worker,) = fleet.workers
        wait_until(lambda: worker.log.exists() and "up" in worker.log.read_text())
        assert fleet.do("freeze", fleet.workers)
        assert fleet.do("terminate", fleet.workers)
        time.sleep(1.0)
        assert worker.ending is not None and worker.runs, "who is stopped cannot end"
        fleet.do("thaw", fleet.workers)
        wait_until(lambda: fleet.endings[0].ended is not None)
    (stop,) = fleet.stops
    assert stop.ended is not None and stop.ended - stop.began > 0.9


@pytest.mark.parametrize(
    ("status", "expected", "found"),
    [
        (200, (), []),
        (503, (), []),
        (404, (404,), []),
        (404, (), ["http-status"]),
        (500, (), ["http-status"]),
        (400, (), ["http-status"]),
    ],
)
def test_a_status_that_no_fault_explains_is_a_violation(
    status: int, expected: tuple[int, ...], found: list[str], tmp_path: Path
) -> None:
    report = Report(1)
    with Ledger(tmp_path) as ledger:
        caller = _caller(ledger, report)
        assert caller.accepts("a read", httpx2.Response(status, text="said"), *expected) == (
            status == 200 or status in expected
        )
    assert [violation.kind for _, _, violation in report.violations] == found


ITEMS = {f"row-{number}": http_item(random.Random(number)) for number in range(4)}
GOOD = [
    {
        "custom_id": name,
        "response": {"body": {"choices": [{"text": expected_of(item).text}]}},
    }
    for name, item in ITEMS.items()
]
WRONG = {**GOOD[1], "response": {"body": {"choices": [{"text": "another"}]}}}


@pytest.mark.parametrize(
    ("status", "rows", "errors", "cancelled", "found"),
    [
        ("completed", GOOD, [], False, []),
        ("completed", GOOD[:3], [], False, ["http-rows"]),
        ("completed", [*GOOD, GOOD[0]], [], False, ["http-rows"]),
        ("completed", GOOD[::-1], [], False, ["http-rows"]),
        ("completed", [GOOD[0], WRONG, *GOOD[2:]], [], False, ["wrong-text"]),
        ("completed", GOOD[:3], [{"custom_id": "row-3"}], False, ["innocent-failed"]),
        ("cancelled", GOOD[:2], [], True, []),
        ("cancelled", GOOD[:2], [], False, ["http-batch"]),
        ("failed", [], [], False, ["http-batch"]),
        ("expired", GOOD, [], False, ["http-batch"]),
    ],
)
def test_a_batch_has_each_row_once_in_order_with_its_text(
    status: str,
    rows: list[dict[str, Any]],
    errors: list[dict[str, Any]],
    cancelled: bool,
    found: list[str],
    tmp_path: Path,
) -> None:
    report = Report(1)
    files = {"out": rows, "err": errors}

    class Answering(HttpCaller):
        def request(self, kind: str, method: str, path: str, *expected: int, **more: Any) -> httpx2.Response:
            content = files[path.split("/")[3]]
            return httpx2.Response(200, text="".join(json.dumps(row) + "\n" for row in content))

    with Ledger(tmp_path) as ledger:
        caller = _caller(ledger, report, Answering)
        traffic = HttpTraffic.__new__(HttpTraffic)  # without its threads
        traffic._report = report
        shown = {"status": status, "errors": None, "output_file_id": "out", "error_file_id": "err"}
        traffic._check(caller, HttpBatch("batch", ITEMS, cancelled), shown)
    assert sorted({violation.kind for _, _, violation in report.violations}) == found


def _caller(ledger: Ledger, report: Report, kind: type[HttpCaller] = HttpCaller) -> HttpCaller:
    fleet: Any = SimpleNamespace(servers=[])
    return kind(fleet, ledger, report, random.Random(1))
