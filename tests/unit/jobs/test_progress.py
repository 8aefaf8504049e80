"""Progress in words: everything that a person asks of a night, on one line."""

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.progress import (
    BatchProgress,
    describe,
    duration,
    log_of_command,
    logged_errors,
)
from nightmill.jobs.commands.terminal import ProgressLine
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.reply.batch_status import BatchRecord, BatchStatus, Pace, RowCount, make_status

RECORD = BatchRecord("night", "model", datetime.now(UTC), format="jsonl", row_count=1_200)


def status(*counts: RowCount, pace: Pace | None = None) -> BatchStatus:
    return make_status(RECORD, counts, pace, [], datetime.now(UTC))


DONE = RowCount(JobState.SUCCEEDED, StopReason.EOS, 1_000, 9, 9)
FAILED = RowCount(JobState.FAILED, StopReason.ERROR, 2)


def test_a_log_for_programs_has_the_numbers_as_fields_and_errors_as_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = log_of_command(Settings(data_dir=tmp_path, log_format="json"))
    assert log is not None and log_of_command(Settings(data_dir=tmp_path)) is None
    with pytest.raises(SystemExit) as ended, logged_errors(log), BatchProgress("night", log=log) as line:
        line.show(status(DONE, FAILED, RowCount(JobState.QUEUED, None, 198)))
        line.show(status(DONE, FAILED, RowCount(JobState.QUEUED, None, 100)))  # too soon after the last
        line.say("waiting")
        raise BatchFileError("out.jsonl: is\nfull")
    assert ended.value.code == 1
    first, second, last = map(json.loads, capsys.readouterr().err.splitlines())
    fields = {"batch": "night", "state": "queued", "rows": 1_200, "done": 1_002, "queued": 198, "failed": 2}
    assert first.items() >= fields.items()
    assert [(one["level"], one["message"]) for one in (second, last)] == [
        ("info", "waiting"),
        ("critical", "out.jsonl: is\nfull"),
    ]


def test_a_running_batch_says_how_fast_it_is_and_when_it_ends() -> None:
    counts = (DONE, FAILED, RowCount(JobState.RUNNING, None, 64), RowCount(JobState.QUEUED, None, 134))
    now = status(*counts, pace=Pace(rows=198, completion_tokens=90_000, seconds=60.0))
    expected = r"running, 2 failed, 64 running, 134 queued, 1,500 tokens/s, ends in about (59|60) s"
    assert re.fullmatch(expected, describe(now))


def test_a_batch_for_later_says_when_it_begins() -> None:
    later = make_status(
        BatchRecord("n", None, RECORD.created_at, "jsonl", row_count=1, scheduled_at=RECORD.created_at),
        [RowCount(JobState.QUEUED, None, 1)],
        None,
        [],
        RECORD.created_at - timedelta(hours=1),
    )
    assert describe(later).startswith("scheduled, 0 running, 1 queued, begins 20")


def test_a_log_gets_a_line_now_and_then_and_the_last_one_always() -> None:
    log = io.StringIO()
    running = status(DONE, RowCount(JobState.RUNNING, None, 200))
    with BatchProgress("night", console=Console(file=log)) as progress:
        for _ in range(3):
            progress.show(running, "loading the model")
        progress.show(status(RowCount(JobState.SUCCEEDED, StopReason.EOS, 1_200)))
    first, last = (line.partition(" ")[2] for line in log.getvalue().splitlines())
    assert first == "1,000 of 1,200 rows, running, 200 running, 0 queued, loading the model"
    assert last == "1,200 of 1,200 rows, completed"


def test_nothing_is_shown_where_nothing_is_wanted() -> None:
    log = io.StringIO()
    with BatchProgress("night", show=False, console=Console(file=log, force_terminal=True)) as progress:
        progress.show(status(DONE))
        progress.say("a word")
    assert log.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0.4, "0 s"), (98, "98 s"), (120, "2 min"), (5_940, "99 min"), (11_100, "3 h 05 min")],
)
def test_a_duration_is_as_coarse_as_it_is_long(seconds: float, text: str) -> None:
    assert duration(seconds) == text


WHOLE = ProgressLine(
    name="nightly-batch",
    done=61_240,
    total=100_000,
    state="running",
    failed="12 failed",
    load="256 running, 38,504 queued",
    speed="24,310 tokens/s",
    end="ends in about 27 min",
    elapsed="0:12:33",
)


def test_a_narrow_terminal_loses_the_speed_then_the_end_and_never_the_count() -> None:
    fitted = {width: WHOLE.fit(width) for width in range(15, 201)}
    assert all(cell_len(line) <= width and "61,240/100,000" in line for width, line in fitted.items())
    assert {"tokens/s", "27 min", "━", "0:12:33", "12 failed"} <= {
        part for part in ("tokens/s", "27 min", "━", "0:12:33", "12 failed") if part in fitted[200]
    }
    narrowest = {
        part: min(width for width, line in fitted.items() if part in line)
        for part in ("tokens/s", "27 min", "61,240/100,000")
    }
    assert narrowest["tokens/s"] > narrowest["27 min"] > narrowest["61,240/100,000"]
    assert ("27 min" in fitted[110], "━" in fitted[80], "nightly-batch" in fitted[60]) == (True, True, True)


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_count_is_on_the_screen_at_any_width(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    record = replace(RECORD, name="[/b]\x1b[2J\u202e" + "night" * 20)
    counts = (DONE, FAILED, RowCount(JobState.RUNNING, None, 198))
    with BatchProgress(record.name, console=console) as progress:
        progress.show(make_status(record, counts, Pace(9, 9_000, 9.0), [], datetime.now(UTC)))
    shown = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", screen.getvalue()).strip()
    assert "[/b]\\x1b[2J\\u202e" in shown and "1,002/1,200" in shown
    assert cell_len(shown) <= width


def test_a_terminal_without_unicode_gets_a_bar_of_ascii() -> None:
    assert WHOLE.fit(60, ascii_only=True).isascii()
