"""Row locks in one global order, batches by name, then jobs by id, so that transactions cannot deadlock.

PostgreSQL locks rows as a statement reaches them, so two transactions that reach the same rows in different
orders would wait for each other. SQLite has one writer at a time, and does not need this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from nightmill.jobs.errors import BatchConflictError
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import BatchRow, JobRow


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """The columns of a locked batch that decide what may be done to it."""

    name: str
    format: str | None
    cancel_requested_at: datetime | None
    deleting_at: datetime | None


def lock_ids(connection: Connection, job_ids: Sequence[str]) -> None:
    """Lock jobs by id, like `lock_jobs`."""
    if connection.dialect.name != "sqlite":
        connection.execute(_LOCK_IDS, {"job_ids": job_ids})


def lock_jobs(connection: Connection, *conditions: Any) -> None:
    """Lock the jobs that match, in the order of their ids, before a transaction changes several of them."""
    if connection.dialect.name != "sqlite":
        connection.execute(select(JobRow.id).where(*conditions).order_by(JobRow.id).with_for_update())


# Built once: with hundreds of ids, building takes as long as executing it.
_LOCK_IDS = select(JobRow.id).where(among(JobRow.id, "job_ids")).order_by(JobRow.id).with_for_update()


def hold_batches(
    connection: Connection, names: Sequence[str], *, whole: bool = False
) -> dict[str, HeldBatch]:
    """Lock batches against deletion, and against being marked for it, until this transaction ends.

    Returns the existing ones. `whole`: lock them against any other change, too. A transaction that adds or
    queues jobs locks their batch first.
    """
    query = select(BatchRow.name, BatchRow.format, BatchRow.cancel_requested_at, BatchRow.deleting_at)
    query = query.where(BatchRow.name.in_(names)).order_by(BatchRow.name)
    locking = query.with_for_update(read=True, key_share=not whole)
    return {row.name: HeldBatch(*row) for row in connection.execute(locking)}


def refuse_deleting(batch: HeldBatch | None, field: str = "batch") -> None:
    """Raise BatchConflictError if a batch is being deleted."""
    if batch is not None and batch.deleting_at is not None:
        raise BatchConflictError(
            f"{field}: batch {batch.name!r} is being deleted: choose another name, or wait until it is gone "
            f"(`nightmill batch delete {batch.name}` resumes an interrupted deletion)",
            field=field,
        )


def refuse_closed(batch: HeldBatch | None) -> None:
    """Raise BatchConflictError if a batch does not accept jobs from `enqueue`."""
    refuse_deleting(batch)
    if batch is not None and batch.format is not None:
        raise BatchConflictError(
            f"batch: {batch.name!r} was submitted as a whole, and takes no more jobs: choose another name",
            field="batch",
        )
