"""The status of a batch, from counts of its rows: state, progress, speed, estimated end. No SQL here."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.printable import printable
from nightmill.jobs.request.limits import GPU_SECONDS, JOULES, TOKENS

MOST_COUNTED = 100_000
"""Most rows before a batch that are counted."""
JOULES_PER_KWH = 3.6e6
_MOST_NAMES = 5
_LONGEST_NAME = 80
_NUMBER = re.compile(r"\d[\d,.]*")


class BatchState(StrEnum):
    """The state of a batch: the first of these that applies, from top to bottom. The last five are final.

    submitting               not all rows of the file are entered yet (some may run already)
    running                  at least one row is running
    scheduled                rows wait for a later time
    queued                   rows wait for a worker
    completed                every row succeeded
    cancelled                somebody cancelled the batch, and that ended at least one row
    expired                  the deadline, or a limit of the batch, ended at least one row
    failed                   no row succeeded, or the file has none
    completed_with_errors    some rows succeeded, the others did not
    """

    SUBMITTING = "submitting"
    RUNNING = "running"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"

    @property
    def final(self) -> bool:
        """True if nothing more happens unless rows are retried."""
        return self not in _UNFINISHED


_UNFINISHED = frozenset({BatchState.SUBMITTING, BatchState.RUNNING, BatchState.SCHEDULED, BatchState.QUEUED})


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it was submitted."""

    name: str
    model: str | None
    created_at: datetime
    format: str | None = None  # None: rows are added by enqueue, at any time
    source: str | None = None
    fingerprint: str | None = None
    settings: dict[str, object] | None = None
    row_count: int | None = None  # None until the last row is entered
    scheduled_at: datetime | None = None
    deadline_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    deleting_at: datetime | None = None  # set once its rows are being deleted
    budget: dict[str, float] | None = None  # most that it may use, by measure
    max_failures: float | None = None  # share of rows that may fail
    spent_tokens: int = 0  # counted while there is a limit
    spent_gpu_seconds: float = 0.0
    spent_joules: float = 0.0
    counted_rows: int = 0  # ended rows that are compared with `max_failures`,
    counted_failures: int = 0  # and those of them that failed
    stopped_at: datetime | None = None  # when it met a limit
    stopped_because: str | None = None

    @property
    def spent(self) -> dict[str, float]:
        """The amounts that its ended rows have used, by measure."""
        return {TOKENS: self.spent_tokens, GPU_SECONDS: self.spent_gpu_seconds, JOULES: self.spent_joules}


@dataclass(frozen=True, slots=True)
class RowCount:
    """The number of rows that share a state and a stop reason, and their tokens."""

    state: JobState
    stop_reason: StopReason | None
    rows: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of those of prompts
    reasoning_tokens: int = 0  # of those of answers
    gpu_seconds: float = 0.0
    energy_joules: float | None = None  # None: of no row is it known
    uncounted_attempts: int = 0  # that ended with their worker: what they cost is in no sum


@dataclass(frozen=True, slots=True)
class Pace:
    """The rows and tokens finished within a period.

    The period of a running batch is the last minute; of a finished one, from the first start of a row to the
    last end.
    """

    rows: int
    completion_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of a batch wherever it is shown: tokens of the ended rows, divided by the period."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Errors that differ only in numbers."""

    rows: int
    message: str  # an example


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatus:
    """A snapshot of a batch's status."""

    name: str
    state: BatchState
    model: str | None
    format: str | None
    source: str | None
    row_count: int | None  # rows of the file; None while it is being submitted, and if rows may be added
    rows: int  # entered so far
    states: dict[JobState, int]  # rows by state
    stop_reasons: dict[StopReason, int]  # rows by stop reason
    errors: list[ErrorGroup] = field(default_factory=list)  # the most frequent first
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float | None  # see Pace; None if not requested
    estimated_end: datetime | None  # None unless rows are left and some finished recently
    created_at: datetime
    scheduled_at: datetime | None
    deadline_at: datetime | None
    cancel_requested_at: datetime | None
    deleting_at: datetime | None = None  # since when its rows are being deleted
    # Models that rows wait for and no live worker serves.
    cached_tokens: int = 0  # of those of prompts, found computed
    reasoning_tokens: int = 0  # of those of answers
    gpu_seconds: float = 0.0  # shares of the steps that computed its rows
    energy_joules: float | None = None  # the same in joules; None: of no row is it known
    uncounted_attempts: int = 0  # that ended with their worker: what they cost is in neither
    unserved: list[str | None] = field(default_factory=list)
    held: int = 0  # queued rows that wait for the ones that they follow
    wakes_at: datetime | None = None  # when the hours of its workers begin, if all of them sleep until then
    rows_before: int | None = None  # rows of others that are served before the next one of these
    budget: dict[str, float] | None = None  # most that it may use, by measure (tokens, gpu_seconds, joules)
    spent: dict[str, float] = field(default_factory=dict)  # of each measure of the budget
    max_failures: float | None = None  # share of rows that may fail
    stopped_at: datetime | None = None  # when it met a limit
    stopped_because: str | None = None

    @property
    def unlisted_errors(self) -> int:
        """Number of failed rows that `errors`, if requested, does not list."""
        failed = self.states.get(JobState.FAILED, 0)
        return max(0, failed - sum(group.rows for group in self.errors)) if self.errors else 0

    @property
    def expected_rows(self) -> int:
        """Rows of the whole batch as far as known: those of its file, or those added so far."""
        return _expected(self.row_count, self.rows)

    @property
    def done(self) -> int:
        """Rows in a final state."""
        return sum(number for state, number in self.states.items() if state.final)

    @property
    def succeeded(self) -> int:
        """Rows with a result."""
        return self.states.get(JobState.SUCCEEDED, 0)

    @property
    def energy_kwh(self) -> float | None:
        """The energy in kWh; None if it is not known."""
        return None if self.energy_joules is None else self.energy_joules / JOULES_PER_KWH

    @property
    def joules_per_token(self) -> float | None:
        """Energy for each generated token, that of prompts included; None if it is not known."""
        if self.energy_joules is None or not self.completion_tokens:
            return None
        return self.energy_joules / self.completion_tokens

    @property
    def unsuccessful(self) -> int:
        """Rows that ended without a complete result."""
        return self.done - self.succeeded


def _expected(row_count: int | None, rows: int) -> int:
    return rows if row_count is None else row_count


def status_values(status: BatchStatus) -> dict[str, Any]:
    """Return the status as a JSON object; `done`, `succeeded` and `unsuccessful` count rows."""
    values = asdict(status)
    values |= {
        name: getattr(status, name)
        for name in (
            *("done", "succeeded", "unsuccessful", "unlisted_errors"),
            *("energy_kwh", "joules_per_token"),
        )
    }
    values["states"] = {str(state): status.states.get(state, 0) for state in JobState}
    values["stop_reasons"] = {str(reason): rows for reason, rows in status.stop_reasons.items()}
    return values


def make_status(
    record: BatchRecord,
    counts: Sequence[RowCount],
    pace: Pace | None,
    errors: Sequence[ErrorGroup],
    now: datetime,
    *,
    served: bool = True,
    unserved: Sequence[str | None] = (),
    held: int = 0,
) -> BatchStatus:
    """Build a status from counts.

    The end is estimated only if live workers take rows of the batch (`served`) and all of them (`unserved` is
    empty).
    """
    states: dict[JobState, int] = {}
    stop_reasons: dict[StopReason, int] = {}
    for count in counts:
        states[count.state] = states.get(count.state, 0) + count.rows
        if count.stop_reason is not None:
            stop_reasons[count.stop_reason] = stop_reasons.get(count.stop_reason, 0) + count.rows
    rows = sum(states.values())
    state = state_of(record, states, stop_reasons, now)
    left = _expected(record.row_count, rows) - sum(n for s, n in states.items() if s.final)
    end = None
    going = served and not unserved and left and state in (BatchState.RUNNING, BatchState.QUEUED)
    if going and pace and pace.rows and pace.seconds > 0:
        end = now + timedelta(seconds=left * pace.seconds / pace.rows)
    joules = [count.energy_joules for count in counts if count.energy_joules is not None]
    return BatchStatus(
        name=record.name,
        state=state,
        model=record.model,
        format=record.format,
        source=record.source or _batch_before(record),
        row_count=record.row_count,
        rows=rows,
        states=states,
        stop_reasons=stop_reasons,
        errors=list(errors),
        prompt_tokens=sum(count.prompt_tokens for count in counts),
        completion_tokens=sum(count.completion_tokens for count in counts),
        cached_tokens=sum(count.cached_tokens for count in counts),
        reasoning_tokens=sum(count.reasoning_tokens for count in counts),
        gpu_seconds=sum(count.gpu_seconds for count in counts),
        energy_joules=sum(joules) if joules else None,
        uncounted_attempts=sum(count.uncounted_attempts for count in counts),
        tokens_per_second=None if pace is None else pace.tokens_per_second,
        estimated_end=end,
        created_at=record.created_at,
        scheduled_at=record.scheduled_at,
        deadline_at=record.deadline_at,
        cancel_requested_at=record.cancel_requested_at,
        deleting_at=record.deleting_at,
        unserved=list(unserved),
        held=held,
        budget=record.budget,
        spent={measure: record.spent.get(measure, 0) for measure in record.budget or ()},
        max_failures=record.max_failures,
        stopped_at=record.stopped_at,
        stopped_because=record.stopped_because,
    )


def _batch_before(record: BatchRecord) -> str | None:
    """Name the batch whose rows those of this one follow, if they follow any."""
    table = (record.settings or {}).get("table")
    return f"rows after {table['after']}" if isinstance(table, dict) and "after" in table else None


def unserved_sentence(models: Sequence[str | None], deadline: str | None = None) -> str:
    """Describe models that rows wait for and no live worker serves; `deadline`: when these rows expire."""
    names = [repr(printable(model, _LONGEST_NAME)) for model in models if model is not None]
    left = f" and {len(names) - _MOST_NAMES:,} others" if len(names) > _MOST_NAMES else ""
    shown = ", ".join(names[:_MOST_NAMES]) + left
    which = f"no live worker serves {shown}" if names else "no worker is running"
    ends = "" if deadline is None else f"; unless one comes, they expire {deadline}"
    return f"{which}: rows wait for one{ends}"


def state_of(
    record: BatchRecord, states: dict[JobState, int], stop_reasons: dict[StopReason, int], now: datetime
) -> BatchState:
    """Determine the state of a batch, in the order of BatchState."""
    if record.row_count == 0 and not sum(states.values()):
        return BatchState.FAILED  # a file without rows
    if record.format is not None and record.row_count is None:
        # No more rows are coming from a cancelled submission that was interrupted.
        over = record.cancel_requested_at is not None and not _unfinished(states)
        return BatchState.CANCELLED if over else BatchState.SUBMITTING
    if states.get(JobState.RUNNING):
        return BatchState.RUNNING
    if states.get(JobState.QUEUED):
        later = record.scheduled_at is not None and record.scheduled_at > now
        return BatchState.SCHEDULED if later else BatchState.QUEUED
    succeeded = states.get(JobState.SUCCEEDED, 0)
    if succeeded == sum(states.values()):
        return BatchState.COMPLETED
    if record.cancel_requested_at is not None and states.get(JobState.CANCELLED):
        return BatchState.CANCELLED
    if stop_reasons.get(StopReason.DEADLINE) or stop_reasons.get(StopReason.BUDGET):
        return BatchState.EXPIRED
    return BatchState.COMPLETED_WITH_ERRORS if succeeded else BatchState.FAILED


def _unfinished(states: dict[JobState, int]) -> int:
    return sum(number for state, number in states.items() if not state.final)


def group_errors(counted: Iterable[tuple[str, int]], most: int) -> list[ErrorGroup]:
    """Group messages that differ only in numbers; `counted` has (message, rows)."""
    groups: dict[str, tuple[int, str]] = {}
    for message, rows in counted:
        shape = _NUMBER.sub("0", message)
        before, example = groups.get(shape, (0, message))
        groups[shape] = (before + rows, example)
    ranked = sorted(groups.values(), key=lambda group: -group[0])
    return [ErrorGroup(rows, example) for rows, example in ranked[:most]]
