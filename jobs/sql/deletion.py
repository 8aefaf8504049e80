"""Deletion of batches: they are marked first, so that they accept nothing, then deleted in groups."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, exists, func, select, update

from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.sql.batch_reading import no_batch
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_tables import WebhookRow
from nightmill.jobs.sql.jobs import FINAL, GROUP, UNFINISHED, chunked
from nightmill.jobs.sql.locks import hold_batches, lock_ids
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BatchRow, JobRow


class Deletion:
    """Deletes batches of one database. Several instances may work on one batch at the same time."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def run(self, name: str) -> Iterator[int]:
        """Delete a batch whose rows are all final, with its rows; yields the number of rows deleted so far.

        If interrupted, the batch stays marked until this is called again.
        """
        self.begin(name)
        gone, over = 0, False
        while not over:
            deleted, over = self.group(name)
            gone += deleted
            yield gone

    @long_lasting
    @retried
    def begin(self, name: str, ended_before: datetime | None = None) -> bool:
        """Mark a batch as being deleted: from now on nothing is added to it or queued again.

        Raises BatchNotFoundError, and InvalidTransitionError if rows are not final. With `ended_before` it
        returns False instead, and also if the batch or the end of a row is later.
        """
        with self.database.write() as connection:
            record = connection.execute(
                select(BatchRow.created_at).where(BatchRow.name == name).with_for_update()
            ).one_or_none()
            left = connection.execute(_count(name).where(JobRow.state.in_(UNFINISHED))).scalar_one()
            if ended_before is not None:
                if record is None or left or record.created_at >= ended_before:
                    return False
                if connection.execute(_count(name).where(JobRow.finished_at >= ended_before)).scalar_one():
                    return False
            if record is None:
                raise no_batch(connection, name)
            if left:
                raise _unfinished(name, left)
            connection.execute(
                update(BatchRow)
                .where(BatchRow.name == name)
                .values(deleting_at=func.coalesce(BatchRow.deleting_at, self.database.now()))
            )
        return True

    @long_lasting
    @retried
    def group(self, name: str) -> tuple[int, bool]:
        """Delete some rows of a marked batch, or the batch if none is left; returns (rows deleted, whether it
        is done)."""
        with self.database.write() as connection:
            rows = select(JobRow.id).where(JobRow.batch == name).order_by(JobRow.id).limit(GROUP)
            ids = connection.execute(rows.with_for_update()).scalars().all()
            gone = delete_jobs(connection, ids)
            if gone < len(ids):  # an older version, which ignores the mark, queued rows again
                raise _unfinished(name, len(ids) - gone)
            if ids:
                return gone, False
        with self.database.write() as connection:
            # Earlier holders of the lock have ended; a new statement sees their changes.
            connection.execute(select(BatchRow.name).where(BatchRow.name == name).with_for_update())
            if connection.execute(rows.limit(1)).one_or_none() is not None:
                return 0, False
            connection.execute(delete(WebhookRow).where(WebhookRow.batch == name))
            connection.execute(delete(BatchRow).where(BatchRow.name == name))
            return 0, True

    @retried
    def withdraw(self, name: str) -> None:
        """Remove a new batch and its webhooks if its submission failed before any row was entered."""
        with self.database.write() as connection:
            hold_batches(connection, [name], whole=True)
            empty = BatchRow.row_count.is_(None) & ~exists().where(JobRow.batch == BatchRow.name)
            if connection.execute(delete(BatchRow).where(BatchRow.name == name, empty)).rowcount:
                connection.execute(delete(WebhookRow).where(WebhookRow.batch == name))


@retried
def delete_job(database: Database, job_id: str) -> bool:
    """Delete a job and its text if it has ended; returns True if it is gone."""
    with database.write() as connection:
        return bool(delete_jobs(connection, [job_id]))


def delete_jobs(connection: Connection, ids: Sequence[str]) -> int:
    """Delete those of these jobs that are final; returns their number."""
    gone = 0
    for chunk in chunked(sorted(ids)):
        lock_ids(connection, chunk)
        gone += connection.execute(
            delete(JobRow).where(JobRow.id.in_(chunk), JobRow.state.in_(FINAL))
        ).rowcount
    return gone


def _count(name: str) -> Any:
    return select(func.count()).select_from(JobRow).where(JobRow.batch == name)


def _unfinished(name: str, left: int) -> InvalidTransitionError:
    rows = "1 row that is" if left == 1 else f"{left} rows that are"
    return InvalidTransitionError(
        f"batch {name!r} has {rows} not finished: wait, or cancel it first (nightmill batch cancel {name})"
    )
