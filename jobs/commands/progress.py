"""Progress of a batch: a live line on a terminal, a line every half minute in a log."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import click

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.times import describe_moment
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine
from nightmill.jobs.errors import EmptyBatchFileError, InvalidRequestError, NightmillError
from nightmill.jobs.reply.batch_status import BatchState, BatchStatus

if TYPE_CHECKING:
    from rich.console import Console  # noqa: TID251 - the name of a type

LOG_SECONDS = 30.0
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
EXIT_FAILED = 4
"""Exit code of a batch without a succeeded row, including one without rows."""


def log_of_command(settings: Settings) -> logging.Logger | None:
    """Return the log for a command's output if it is to be JSON lines on stderr."""
    if settings.log_format != "json":
        return None
    handler = logging.StreamHandler(sys.stderr)
    fit([handler], settings.log_format, settings.scrubbed)
    log = logging.getLogger("nightmill.command")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    return log


class _NoRowsException(click.ClickException):
    exit_code = EXIT_FAILED


@contextmanager
def logged_errors(log: logging.Logger | None, options: Mapping[str, str] = _NO_OPTIONS) -> Iterator[None]:
    """Log Nightmill's errors, if there is a log, and exit with 1, or with 4 for an empty file.

    options  what this command calls fields of a request for which it has options of other names
    """
    try:
        yield
    except NightmillError as caught:
        error = caught
        if isinstance(caught, InvalidRequestError) and caught.field in options:
            error = caught.renamed(options[str(caught.field)])
        kind = _NoRowsException if isinstance(error, EmptyBatchFileError) else click.ClickException
        failure = kind(str(error))
        if log is None:
            raise failure from error
        log.critical("%s", error)
        raise SystemExit(failure.exit_code) from error


class BatchProgress:
    """A display of statuses on stderr. `show` False disables it; with `log`, statuses are logged instead."""

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
        self._line = LiveLine(ProgressLine(name=name), show=show and log is None, console=console)

    def say(self, text: str) -> None:
        """Print a separate line."""
        if self._log is not None:
            self._log.info("%s", text)
        elif self._show:
            self._line.say(text)

    def show(self, status: BatchStatus, note: str = "") -> None:
        """Replace the displayed status and note."""
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
        """Return True if this status is worth a line in a log."""
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


def line_of(status: BatchStatus) -> ProgressLine:
    """Convert a status to a line of progress."""
    running, queued = (status.states.get(state, 0) for state in (JobState.RUNNING, JobState.QUEUED))
    held = f" ({status.held:,} wait for others)" if status.held else ""
    end = ""
    if status.state is BatchState.SCHEDULED and status.scheduled_at is not None:
        end = f"begins {describe_moment(status.scheduled_at)}"
    elif status.estimated_end is not None:
        end = f"ends in about {duration((status.estimated_end - _now()).total_seconds())}"
    speed = status.tokens_per_second
    return ProgressLine(
        name=status.name,
        done=status.done,
        total=status.expected_rows,
        state=str(status.state),
        failed=f"{status.unsuccessful:,} failed" if status.unsuccessful else "",
        load="" if status.state.final else f"{running:,} running, {queued:,} queued{held}",
        speed="" if speed is None else f"{speed:,.0f} tokens/s",
        end=end,
    )


def describe(status: BatchStatus) -> str:
    """Describe a status besides its number of finished rows."""
    return line_of(status).facts()


def duration(seconds: float) -> str:
    """Format seconds as 45 s, 12 min, or 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 99:
        return f"{max(0, round(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _now() -> datetime:
    return datetime.now(UTC)
