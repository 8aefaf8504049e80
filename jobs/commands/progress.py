"""Progress of a batch: a live line on a terminal, a line every half minute in a log."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nightmill.jobs.batch_status import BatchState, BatchStatus
from nightmill.jobs.commands.terminal import Line, LiveLine
from nightmill.jobs.contract import JobState
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.logs import fit
from nightmill.jobs.settings import Settings
from nightmill.jobs.when import describe_moment

if TYPE_CHECKING:
    from rich.console import Console  # noqa: TID251 - the name of a type

LOG_SECONDS = 30.0


def log_of_command(settings: Settings) -> logging.Logger | None:
    """Where a command says what it does, if that is to be an object of JSON on each line of stderr."""
    if settings.log_format != "json":
        return None
    handler = logging.StreamHandler(sys.stderr)
    fit([handler], settings.log_format, settings.scrubbed)
    log = logging.getLogger("nightmill.command")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    return log


@contextmanager
def logged_errors(log: logging.Logger | None) -> Iterator[None]:
    """Errors of ours go to the log, if there is one, and end the command with 1."""
    try:
        yield
    except NightmillError as error:
        if log is None:
            raise
        log.critical("%s", error)
        raise SystemExit(1) from error


class BatchProgress:
    """Shows statuses on stderr as they come. `show` False shows nothing; with `log` it is told all of it."""

    def __init__(
        self,
        name: str,
        *,
        show: bool = True,
        console: "Console | None" = None,
        log: logging.Logger | None = None,
    ) -> None:
        self._show = show
        self._log = log
        self._logged_at = float("-inf")
        self._line = LiveLine(Line(name=name), show=show and log is None, console=console)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._log is not None:
            self._log.info("%s", text)
        elif self._show:
            self._line.say(text)

    def show(self, status: BatchStatus, note: str = "") -> None:
        """Show this status, and a note on what is going on, in place of the last ones."""
        if self._log is not None:
            self._show_as_fields(self._log, status, note)
            return
        line = replace(line_of(status), note=note)
        self._line.update(line)
        if not self._show or self._line.shown:
            return
        if self._is_time(status):
            now = datetime.now().astimezone().strftime("%H:%M:%S")
            self._line.say(f"{now} {line.done:,} of {line.total or 0:,} rows, {line.facts()}")

    def _is_time(self, status: BatchStatus) -> bool:
        """Whether this status is worth a line in a log."""
        if not status.state.final and time.monotonic() - self._logged_at < LOG_SECONDS:
            return False
        self._logged_at = time.monotonic()
        return True

    def _show_as_fields(self, log: logging.Logger, status: BatchStatus, note: str) -> None:
        if not self._is_time(status):
            return
        fields: dict[str, object] = {
            "batch": status.name,
            "state": status.state,
            "rows": status.expected_rows,
            "done": status.done,
            "tokens_per_second": status.tokens_per_second,
            "estimated_end": status.estimated_end,
        }
        fields |= {str(state): status.states.get(state, 0) for state in JobState}
        log.info("%s", note or "progress", extra=fields)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, trace)


def line_of(status: BatchStatus) -> Line:
    """A status as a line of progress."""
    running, queued = (status.states.get(state, 0) for state in (JobState.RUNNING, JobState.QUEUED))
    end = ""
    if status.state is BatchState.SCHEDULED and status.scheduled_at is not None:
        end = f"begins {describe_moment(status.scheduled_at)}"
    elif status.estimated_end is not None:
        end = f"ends in about {duration((status.estimated_end - _now()).total_seconds())}"
    speed = status.tokens_per_second
    return Line(
        name=status.name,
        done=status.done,
        total=status.expected_rows,
        state=str(status.state),
        failed=f"{status.unsuccessful:,} failed" if status.unsuccessful else "",
        load="" if status.state.final else f"{running:,} running, {queued:,} queued",
        speed="" if speed is None else f"{speed:,.0f} tokens/s",
        end=end,
    )


def describe(status: BatchStatus) -> str:
    """What there is to say beside the number of rows done."""
    return line_of(status).facts()


def duration(seconds: float) -> str:
    """Seconds as 45 s, 12 min, or 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 99:
        return f"{max(0, round(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _now() -> datetime:
    return datetime.now(UTC)
