"""Handling of jobs in flight at a worker's death, so that the innocent do not fail with the guilty one.

A job that was alone in its worker is charged with a failed attempt. If there were several, any may have
killed the worker, so none is charged: they become suspects, queued again in two halves, each a group that a
worker runs with nothing else. A group that dies again is halved again, until the guilty job is alone: with n
jobs in flight that takes log2(n) more deaths, and its attempts.

The column `jobs.suspects` has the group's id, which sorts by creation. The oldest group runs first: all
halves run before any quarter, so innocent jobs finish early.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, or_, select, update

from nightmill.jobs.base.contract import MAX_ERROR_LENGTH, JobState, JsonObject, StopReason, storable
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.sql import followers, limits
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow

_GROUPS = IdSource()
_TO_QUEUE: dict[str, Any] = {"state": JobState.QUEUED, "worker": None, "sent_at": None, "started_at": None}
UNCOUNTED: dict[str, Any] = {"uncounted_attempts": func.coalesce(JobRow.uncounted_attempts, 0) + 1}
"""The values of a job whose worker has died: what the attempt cost died with it."""


def running_jobs(connection: Connection, worker_id: str) -> Sequence[Any]:
    """Return the columns that `charge` needs of a worker's running jobs, locked in the order of their ids."""
    return connection.execute(
        select(
            JobRow.id,
            JobRow.attempt,
            JobRow.worker,
            JobRow.failures,
            JobRow.max_attempts,
            JobRow.errors,
            JobRow.cancel_requested_at,
        )
        .where(JobRow.worker == worker_id, RUNNING)
        .order_by(JobRow.id)
        .with_for_update()
    ).all()


def charge(connection: Connection, rows: Sequence[Any], reason: str, now: datetime) -> list[str]:
    """Charge a worker's death to these rows of `running_jobs`; returns the ids that are queued again."""
    if len(rows) == 1:
        return [rows[0].id] if _count_failure(connection, rows[0], reason, now) else []
    cancelled = [row.id for row in rows if row.cancel_requested_at is not None]
    for chunk in chunked(cancelled):  # a queued job's cancel request would never be read
        connection.execute(
            update(JobRow)
            .where(JobRow.id.in_(chunk), RUNNING)
            .values(state=JobState.CANCELLED, stop_reason=StopReason.CANCELLED, finished_at=now, **UNCOUNTED)
        )
        followers.ended(connection, chunk, now)
    left = [row.id for row in rows if row.cancel_requested_at is None]
    middle = (len(left) + 1) // 2
    for half in (left[:middle], left[middle:]):
        group = _GROUPS.draw()
        for chunk in chunked(half):
            connection.execute(
                update(JobRow)
                .where(JobRow.id.in_(chunk), RUNNING)
                .values(**_TO_QUEUE, suspects=group, **UNCOUNTED)
            )
    return left


def next_group(connection: Connection, models: Iterable[str | None], now: datetime) -> str | None:
    """Return the next group for a worker of these models: the most urgent, then the oldest."""
    query = (
        select(JobRow.suspects)
        .where(QUEUED, JobRow.suspects.is_not(None), of_models(models), *claimable(now))
        .group_by(JobRow.suspects)
        .order_by(func.max(JobRow.priority).desc(), JobRow.suspects)
        .limit(1)
    )
    return connection.execute(query).scalar_one_or_none()


def of_models(models: Iterable[str | None]) -> ColumnElement[bool]:
    """Return the condition for jobs of `models`; None stands for jobs without a model."""
    return or_(*(JobRow.model.is_(None) if model is None else JobRow.model == model for model in models))


def claimable(now: datetime | ColumnElement[datetime]) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for queued jobs that are due, not held, before their deadline, and of no stopped
    batch."""
    return (
        QUEUED,
        JobRow.held.is_(None),
        or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now),
        or_(JobRow.deadline_at.is_(None), JobRow.deadline_at > now),
        limits.batch_goes_on(),
    )


def history(row: Any, reason: str, now: datetime) -> list[JsonObject]:
    """Return the row's `errors` with a new entry."""
    entry = {
        "attempt": row.attempt,
        "worker": row.worker,
        "at": now.isoformat(),
        "error": storable(reason, MAX_ERROR_LENGTH),
    }
    return [*(row.errors if isinstance(row.errors, list) else []), entry]


def _count_failure(connection: Connection, row: Any, reason: str, now: datetime) -> bool:
    """Charge a running row with a failed attempt; returns True if it is queued again, False if it has
    ended."""
    failures = row.failures + 1
    again = failures < row.max_attempts
    cancelled = row.cancel_requested_at is not None
    values: dict[str, Any] = {"failures": failures, "errors": history(row, reason, now)} | UNCOUNTED
    if cancelled:
        values |= {"state": JobState.CANCELLED, "stop_reason": StopReason.CANCELLED, "finished_at": now}
    elif again:
        values |= _TO_QUEUE | {"suspects": _GROUPS.draw()}  # a group of its own, so that it runs alone
    else:
        values |= {
            "state": JobState.FAILED,
            "stop_reason": StopReason.ERROR,
            "error": f"all {row.max_attempts} attempts failed; the last: {reason}",
            "finished_at": now,
        }
    connection.execute(
        update(JobRow).where(JobRow.id == row.id, RUNNING, JobRow.attempt == row.attempt).values(values)
    )
    if cancelled or not again:
        followers.ended(connection, [row.id], now)
    if not cancelled and not again:
        limits.count_failed(connection, row.id, now)
    return again and not cancelled
