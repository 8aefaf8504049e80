"""Progress of a batch for a person: a live bar on a terminal, a line every half minute in a log."""

import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jobs.batch_status import BatchState, BatchStatus
from jobs.contract import JobState
from jobs.when import describe_moment

LOG_SECONDS = 30.0


class BatchProgress:
    """Shows statuses on stderr as they come. `show` False shows nothing."""

    def __init__(self, name: str, *, show: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._show = show
        self._logged_at = float("-inf")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not show or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None, text="")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._show:
            self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, status: BatchStatus, note: str = "") -> None:
        """Show this status, and a note on what is going on, in place of the last ones."""
        text = ", ".join(part for part in (describe(status), note) if part)
        total = status.row_count or status.rows
        self._bar.update(self._task, total=total, completed=status.done, text=text)
        if not self._show or self._console.is_terminal:
            return
        if status.state.final or time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            clock = datetime.now().astimezone().strftime("%H:%M:%S")
            self._console.print(
                f"{clock} {status.done:,} of {total:,} rows, {text}", highlight=False, soft_wrap=True
            )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def describe(status: BatchStatus) -> str:
    """What there is to say beside the number of rows done."""
    parts = [str(status.state)]
    if status.unsuccessful:
        parts.append(f"{status.unsuccessful:,} failed")
    if not status.state.final:
        running, queued = (status.states.get(state, 0) for state in (JobState.RUNNING, JobState.QUEUED))
        parts.append(f"{running:,} running, {queued:,} queued")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.state is BatchState.SCHEDULED and status.scheduled_at is not None:
        parts.append(f"begins {describe_moment(status.scheduled_at)}")
    if status.estimated_end is not None:
        parts.append(f"ends in about {duration((status.estimated_end - _now()).total_seconds())}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as 45 s, 12 min, or 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 99:
        return f"{max(0, round(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _now() -> datetime:
    return datetime.now(UTC)
