"""The judge of time: calls and ends in time pass; a call without an answer, a process that goes on do not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaign import limits
from tests.campaign.lateness import Late, Watchdog, lost
from tests.campaign.ledger import Call, Ledger
from tests.campaign.promptness import Ending, Stop, Timing, judge_time, stopped

pytestmark = pytest.mark.heavy


def kinds(
    *,
    calls: tuple[Call, ...] = (),
    endings: tuple[Ending, ...] = (),
    stops: tuple[Stop, ...] = (),
    lateness: tuple[Late, ...] = (),
    until: float = 500.0,
) -> list[str]:
    """What the judge says."""
    return [one.kind for one in judge_time(Timing(calls, endings, stops, lateness, until))]


def test_what_is_in_time_passes() -> None:
    calls = (Call("get", 10.0, 100.0, 109.0), Call("get", 10.0, 495.0))
    endings = (Ending("worker-0", 7, 49.0, 100.0, 148.0), Ending("server-0", 8, 49.0, 480.0))
    assert kinds(calls=calls, endings=endings) == []


def test_a_caller_without_an_answer_is_caught_also_if_it_comes_late() -> None:
    assert kinds(calls=(Call("get", 10.0, 100.0),)) == ["no-answer"]
    assert kinds(calls=(Call("get", 10.0, 100.0, 111.0),)) == ["late-answer"]


def test_a_process_that_does_not_end_is_caught_also_if_it_was_killed_then() -> None:
    assert kinds(endings=(Ending("worker-0", 7, 49.0, 100.0),)) == ["never-ends"]
    assert kinds(endings=(Ending("worker-0", 7, 49.0, 100.0, 151.0, killed=True),)) == ["never-ends"]


def test_what_hung_beside_an_end_is_no_excuse_and_is_named() -> None:
    ending = Ending("worker-0", 7, 49.0, 100.0, hung="Redis")
    (violation,) = judge_time(Timing((), (ending,), (), (), 500.0))
    assert violation.kind == "never-ends"
    assert "worker-0 still runs 400.0 s after SIGTERM, beside Redis; 49.0 s are allowed" in violation.said


def test_the_time_that_a_server_was_stopped_counts_for_its_calls_alone() -> None:
    calls = (Call("GET of server-0", 10.0, 100.0, 125.0, keeper="server-0"),)
    assert kinds(calls=calls, stops=(Stop("server-0", 7, 90.0, 120.0),)) == []
    assert kinds(calls=calls, stops=(Stop("server-0", 7, 90.0, 110.0),)) == ["late-answer"]
    assert kinds(calls=calls, stops=(Stop("server-1", 7, 90.0, 120.0),)) == ["late-answer"]


def test_the_time_that_a_process_was_stopped_counts_for_its_own_end_alone() -> None:
    endings = (Ending("worker-0", 7, 49.0, 100.0, 160.0),)
    assert kinds(endings=endings, stops=(Stop("worker-0", 7, 110.0, 130.0),)) == []
    assert kinds(endings=endings, stops=(Stop("worker-0", 6, 110.0, 130.0),)) == ["never-ends"], (
        "another process of that name"
    )


def test_stops_that_overlap_count_once() -> None:
    stops = [Stop("w", 1, 10.0, 20.0), Stop("w", 1, 12.0, 15.0), Stop("w", 1, 18.0, None)]
    assert stopped(stops, 0.0, 25.0) == 15.0
    assert stopped(stops, 11.0, 13.0) == 2.0
    assert stopped(stops, 0.0, 5.0) == 0.0


def test_the_lateness_of_the_machine_is_added_where_it_was() -> None:
    call = (Call("get", 10.0, 100.0, 115.0),)
    assert kinds(calls=call, lateness=(Late(105.0, 3.0), Late(110.0, 3.0))) == []
    assert kinds(calls=call, lateness=(Late(50.0, 3.0), Late(110.0, 3.0))) == ["late-answer"]
    assert lost([Late(1.0, 1.0), Late(2.0, 1.0), Late(9.0, 1.0)], 1.5, 5.0) == 1.0


def test_a_watchdog_that_is_stopped_itself_says_for_how_long(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from tests.campaign.lateness import Watchdog, lost\n"
        "with Watchdog() as watchdog:\n"
        "    began = time.monotonic()\n"
        "    print('begun', flush=True)\n"
        "    input()\n"
        "    time.sleep(0.5)\n"
        "print(lost(watchdog.lateness, began, time.monotonic()))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("\n", timeout=240)
    assert float(said) > 1.2


def test_lateness_is_never_more_than_the_time_that_has_passed() -> None:
    began = time.monotonic()
    with Watchdog() as watchdog:
        time.sleep(1.0)
    assert watchdog.lateness
    assert 0.0 <= lost(watchdog.lateness, began, time.monotonic()) <= time.monotonic() - began


def test_a_call_is_timed_to_its_answer_and_to_its_refusal(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        with ledger.timing("get", 5.0):
            assert ledger.calls[0].ended is None, "a call that is under way is known already"
        with pytest.raises(RuntimeError), ledger.timing("GET", 5.0, "server-1"):
            raise RuntimeError
    assert [(call.what, call.keeper) for call in ledger.calls] == [("get", "campaign"), ("GET", "server-1")]
    assert all(call.ended is not None and call.ended >= call.began for call in ledger.calls)


def test_every_kind_of_call_and_of_process_has_a_limit() -> None:
    assert limits.client_limit("get") < limits.client_limit("submit_batch")
    assert limits.http_limit("read") <= 15.0, "reads and writes are answered or refused within 10 s"
    assert limits.http_limit("list") <= 35.0, "and lists within 30 s"
    assert limits.http_limit("completion") > limits.REQUEST_SECONDS
    assert limits.grace("worker") < limits.grace("run"), "a run waits for its worker"
    with pytest.raises(KeyError):
        limits.grace("another")
