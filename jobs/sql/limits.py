"""Counters of what rows of limited batches use, raised in the transaction that ends a row.

The counters of a batch are changed last in a transaction, behind the locks of its jobs, and in the order of
the batches' names: so these transactions wait for each other in one order.

Rows in flight end as they would: so a budget is exceeded by what they use, and by nothing else, since no row
of a stopped batch is claimed. A sweep ends the queued ones (`Sweep.end_stopped`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, exists, func, or_, select, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import BatchConflictError
from nightmill.jobs.reply.batch_status import group_errors
from nightmill.jobs.request.limits import GPU_SECONDS, JOULES, TOKENS, Limits, exceeded
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import RUNNING, BatchRow, JobRow

_MOST_KINDS = 3  # of failures that are named
_MOST_MESSAGES = 2_000

_MEASURED = {GPU_SECONDS: JobRow.gpu_seconds, JOULES: JobRow.energy_joules}
_SPENT = {TOKENS: "spent_tokens", GPU_SECONDS: "spent_gpu_seconds", JOULES: "spent_joules"}
_LIMITED = or_(BatchRow.budget.is_not(None), BatchRow.max_failures.is_not(None))


def batch_goes_on() -> ColumnElement[bool]:
    """Return the condition for jobs whose batch no limit has stopped."""
    return ~exists().where(BatchRow.name == JobRow.batch, BatchRow.stopped_at.is_not(None))


def _tokens() -> ColumnElement[int]:
    """Return the tokens that a row used: those of a prompt count once an answer has begun, and a text that
    was taken from another row costs nothing."""
    answered = or_(JobRow.state == JobState.SUCCEEDED, JobRow.completion_tokens > 0)
    read = case((answered, func.coalesce(JobRow.prompt_tokens, 0)), else_=0)
    used = read + func.coalesce(JobRow.completion_tokens, 0)
    return case((JobRow.reused_from.is_(None), used), else_=0)


def _measures() -> list[ColumnElement[Any]]:
    return [
        _tokens().label(TOKENS),
        *(func.coalesce(column, 0).label(measure) for measure, column in _MEASURED.items()),
    ]


def _used(row: Row[Any]) -> dict[str, float]:
    return {measure: getattr(row, measure) for measure in (TOKENS, *_MEASURED)}


@dataclass(frozen=True, slots=True)
class Before:
    """A running row of a limited batch, before its end is written."""

    batch: str
    used: Mapping[str, float]  # by a text that is being extended


# Built once: with each group of results they are executed, and mostly find nothing.
_BEFORE_END = (
    select(JobRow.id, JobRow.batch, *_measures())
    .join(BatchRow, BatchRow.name == JobRow.batch)
    .where(among(JobRow.id, "job_ids"), RUNNING, _LIMITED)
)
_ENDED = select(JobRow.id, JobRow.state, JobRow.stop_reason, *_measures()).where(
    among(JobRow.id, "job_ids"), JobRow.state != JobState.RUNNING
)


def before_end(connection: Connection, job_ids: Sequence[str]) -> dict[str, Before]:
    """Return those of these jobs that run for a limited batch. Lock the jobs first."""
    rows = connection.execute(_BEFORE_END, {"job_ids": job_ids})
    return {row.id: Before(row.batch, _used(row)) for row in rows}


def count_ended(connection: Connection, before: Mapping[str, Before], now: datetime) -> None:
    """Count those of the rows of `before_end` that have ended since, and stop batches that meet a limit.

    Of one that was handed back, only what its attempt cost is counted.
    """
    if not before:
        return
    rows = connection.execute(_ENDED, {"job_ids": list(before)}).all()
    by_batch: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        was, counters = before[row.id], by_batch[before[row.id].batch]
        for measure, used in _used(row).items():
            counters[_SPENT[measure]] += max(0, used - was.used[measure])
        failed = row.stop_reason == StopReason.ERROR
        counters["counted_failures"] += failed
        counters["counted_rows"] += failed or row.state == JobState.SUCCEEDED
    for name in sorted(by_batch):
        _add(connection, name, by_batch[name], now)


def count_failed(connection: Connection, job_id: str, now: datetime) -> None:
    """Count a job that has failed without an answer."""
    of_job = select(JobRow.batch).where(JobRow.id == job_id).scalar_subquery()
    limited = connection.execute(select(BatchRow.name).where(BatchRow.name == of_job, _LIMITED))
    if (name := limited.scalar_one_or_none()) is not None:
        _add(connection, name, {"counted_rows": 1, "counted_failures": 1}, now)


def _add(connection: Connection, name: str, counters: Mapping[str, float], now: datetime) -> None:
    row = connection.execute(
        update(BatchRow)
        .where(BatchRow.name == name)
        .values({counter: getattr(BatchRow, counter) + number for counter, number in counters.items()})
        .returning(*_STATE)
    ).one_or_none()
    if row is not None and row.stopped_at is None:
        _stop(connection, name, row, now)


_STATE = (
    *(BatchRow.budget, BatchRow.max_failures, BatchRow.stopped_at, BatchRow.counted_rows),
    *(BatchRow.counted_failures, *(getattr(BatchRow, column) for column in _SPENT.values())),
)


def _met(row: Row[Any]) -> str | None:
    spent = {measure: getattr(row, column) for measure, column in _SPENT.items()}
    return exceeded(row.budget, spent, row.max_failures, row.counted_rows, row.counted_failures)


def _stop(connection: Connection, name: str, row: Row[Any], now: datetime) -> None:
    """Stop a batch if it meets a limit, saying which."""
    why = _met(row)
    if why is None:
        return
    if exceeded(row.budget, {m: getattr(row, c) for m, c in _SPENT.items()}, None, 0, 0) is None:
        kinds = _kinds_of_failures(connection, name)
        why = "; ".join([why, *kinds])
    connection.execute(
        update(BatchRow).where(BatchRow.name == name).values(stopped_at=now, stopped_because=why)
    )


def _kinds_of_failures(connection: Connection, name: str) -> list[str]:
    failed = (JobRow.batch == name, JobRow.state == JobState.FAILED, JobRow.stop_reason == StopReason.ERROR)
    message = func.substr(JobRow.error, 1, 300).label("message")
    query = select(message, func.count().label("rows")).where(*failed).group_by("message")
    rows = connection.execute(query.order_by(func.count().desc()).limit(_MOST_MESSAGES))
    groups = group_errors(((row.message or "", row.rows) for row in rows), _MOST_KINDS)
    return [f"{group.rows:,} x {group.message}" for group in groups]


# -- by the owner of the batch ---------------------------------------------------------------------


def change(connection: Connection, name: str, limits: Limits) -> None:
    """Write new limits of a locked batch; those of which nothing is said stay."""
    row = connection.execute(select(*_STATE).where(BatchRow.name == name)).one()
    values: dict[str, Any] = {}
    if limits.budget is not None:
        values["budget"] = {**(row.budget or {}), **limits.budget} if limits.budget else None
    if limits.max_failures is not None:
        values["max_failures"] = None if limits.max_failures >= 1 else limits.max_failures
    if values:
        connection.execute(update(BatchRow).where(BatchRow.name == name).values(values))


def recount(connection: Connection, name: str, now: datetime) -> bool:
    """Bring the counters up to what the rows say, and stop the batch or let it go on; True if it goes on.

    Lock the running jobs of the batch first: whoever ends one of them later sees the limits. Rows that were
    queued again have used more than they say, so no counter falls.
    """
    columns: list[Any] = [func.coalesce(func.sum(_tokens()), 0).label(TOKENS)]
    columns += [func.coalesce(func.sum(column), 0).label(name) for name, column in _MEASURED.items()]
    failed = JobRow.stop_reason == StopReason.ERROR
    computed = and_(JobRow.started_at.is_not(None), or_(failed, JobRow.state == JobState.SUCCEEDED))
    columns.append(func.count(case((computed, 1))).label("rows"))
    columns.append(func.count(case((and_(computed, failed), 1))).label("failures"))
    sums = connection.execute(select(*columns).where(JobRow.batch == name)).one()
    row = connection.execute(select(*_STATE).where(BatchRow.name == name)).one()
    values: dict[str, Any] = {
        _SPENT[measure]: max(getattr(row, _SPENT[measure]), used) for measure, used in _used(sums).items()
    }
    if not row.counted_rows:
        values |= {"counted_rows": sums.rows, "counted_failures": sums.failures}
    done = update(BatchRow).where(BatchRow.name == name)
    values |= {"stopped_at": None, "stopped_because": None}
    row = connection.execute(done.values(values).returning(*_STATE)).one()
    _stop(connection, name, row, now)
    return _met(row) is None


def begin_anew(connection: Connection, name: str) -> None:
    """Let a locked batch go on whose rows are queued again: its failures are counted from here.

    Raises BatchConflictError if its budget is used up.
    """
    counted = update(BatchRow).where(BatchRow.name == name).values(counted_rows=0, counted_failures=0)
    row = connection.execute(counted.returning(*_STATE)).one()
    if (why := _met(row)) is not None:
        raise BatchConflictError(
            f"batch {name!r}: {why}, so rows that are queued again would end at once: raise it first "
            f"(nightmill batch budget {name} --budget AMOUNT), which queues them, too",
            field="batch",
        )
    if row.stopped_at is not None:
        going = update(BatchRow).where(BatchRow.name == name)
        connection.execute(going.values(stopped_at=None, stopped_because=None))
