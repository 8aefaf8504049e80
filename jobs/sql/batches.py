"""Changes of whole batches: entering rows, cancelling, retrying; `batch_reading.py` has what is read of them.

Changes to up to a million rows are made in groups, a transaction each, so that they block nobody for long.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select, text, update

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.stepping import exhaust
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.sql import answers, followers, limits, logprobs, partials
from nightmill.jobs.sql.batch_reading import BATCHES, BatchReader, batch_in, no_batch
from nightmill.jobs.sql.jobs import (
    CHUNK,
    FINAL,
    RETRYABLE,
    by_queue,
    cancelled_values,
    chunked,
    dialect_insert,
    retried_values,
)
from nightmill.jobs.sql.locks import hold_batches, lock_jobs, refuse_deleting
from nightmill.jobs.sql.many import insert_jobs
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import QUEUED, RUNNING, BatchRow, JobRow

_MANY_ROWS = 2_000

UNSUCCESSFUL = (JobState.FAILED, JobState.CANCELLED)


class BatchStore(BatchReader):
    """The batches in SQL."""

    # -- submitting ------------------------------------------------------------------------------

    @retried
    def enter(self, record: BatchRecord) -> tuple[BatchRecord, bool]:
        """Insert a batch unless its name exists; returns (the batch in SQL, True if it is new).

        Raises BatchConflictError if the existing batch is being deleted.
        """
        with self.database.write() as connection:
            statement = dialect_insert(connection, BATCHES).on_conflict_do_nothing(index_elements=["name"])
            entering = statement.values(**asdict(record), metadata={}).returning(BatchRow.name)
            while True:
                entered = connection.execute(entering).one_or_none()
                locked = hold_batches(connection, [record.name])
                if locked:  # otherwise it was deleted between the two statements
                    refuse_deleting(locked[record.name], "name")
                    return batch_in(connection, record.name), entered is not None

    @retried
    def insert_rows(self, name: str, rows: Sequence[dict[str, Any]]) -> list[str] | None:
        """Insert rows, all with the same keys, in one transaction. Existing rows are not changed.

        Returns those that follow what has ended already: they are due, and to be announced as others. If the
        batch was cancelled meanwhile, rows are inserted as cancelled and None is returned. Raises
        BatchConflictError or BatchNotFoundError if it was deleted meanwhile.
        """
        with self.database.write() as connection:
            found = hold_batches(connection, [name], whole=True).get(name)
            if found is None:
                raise BatchNotFoundError(f"batch {name!r} was deleted while its rows were entered")
            refuse_deleting(found, "name")
            cancelled = found.cancel_requested_at is not None
            if cancelled:
                values = cancelled_values(self.database.now())
                rows = [row if row["state"] in FINAL else row | values for row in rows]
            if any(row.get("prior") for row in rows):
                rows = _with_known(connection, name, rows)
            priors = sorted({row["prior"] for row in rows if row.get("prior")})
            followers.lock_priors(connection, priors)
            insert_jobs(connection, rows, unless_there="row")
            due = followers.settle(connection, priors, self.database.now(), announced=True)
        return None if cancelled else due

    @retried
    def complete(self, name: str, row_count: int) -> None:
        """Record that all rows are entered."""
        with self.database.write() as connection:
            connection.execute(
                update(BatchRow)
                .where(BatchRow.name == name, BatchRow.row_count.is_(None))
                .values(row_count=row_count)
            )
            if row_count >= _MANY_ROWS and not self.database.is_sqlite:
                # PostgreSQL would analyse the table by itself within a minute, and choose bad plans until
                # then.
                connection.execute(text("ANALYZE jobs"))

    # -- change of mind --------------------------------------------------------------------------

    @long_lasting
    def cancel(self, name: str) -> tuple[int, int]:
        """Cancel every row that is not final; returns (cancelled now, running and asked to stop).

        Running rows are asked first, since they cost the most, and again at the end, as rows may have been
        claimed meanwhile.
        """
        return exhaust(self.cancelling(name))

    def cancelling(self, name: str) -> Generator[None, None, tuple[int, int]]:
        """Do the same as `cancel` in small steps; yields between steps."""
        now = self.database.now()
        self._request_cancel(name, now)
        asked = self._ask_to_stop(name, (RUNNING,), now)
        cancelled = 0
        while True:
            for page in self._pages(name, JobRow.id):
                ids = [row.id for row in page if row.state == JobState.QUEUED]
                if not cancelled:  # the rows that workers would claim next come first, in a short transaction
                    cancelled += len(self.change_rows(ids[:CHUNK], (QUEUED,), cancelled_values(now)))
                    asked += self._ask_to_stop(name, (RUNNING, JobRow.cancel_requested_at.is_(None)), now)
                    ids = ids[CHUNK:]
                    yield
                cancelled += len(self.change_rows(ids, (QUEUED,), cancelled_values(now)))
                yield
            asked += self._ask_to_stop(name, (RUNNING, JobRow.cancel_requested_at.is_(None)), now)
            if not self._any(name, QUEUED):
                return cancelled, asked

    @long_lasting
    def retry_failed(
        self, name: str, deadline: datetime | None
    ) -> Iterator[Mapping[tuple[str | None, int], list[str]]]:
        """Queue rows again that ended without a result and can have one; yields groups to announce.

        Raises BatchConflictError if the batch is being deleted.
        """
        self.reopen(name, deadline)
        for ids in self.pages_of_ids(name, UNSUCCESSFUL):
            values = retried_values(self.database.now(), deadline)
            if changed := self.change_rows(ids, RETRYABLE, values, batch=name):
                yield by_queue(row._mapping for row in changed)

    # -- helpers ---------------------------------------------------------------------------------

    @retried
    def _request_cancel(self, name: str, now: datetime) -> None:
        with self.database.write() as connection:
            connection.execute(
                update(BatchRow)
                .where(BatchRow.name == name)
                .values(cancel_requested_at=func.coalesce(BatchRow.cancel_requested_at, now))
            )

    @retried
    def reopen(self, name: str, deadline: datetime | None) -> None:
        """Let rows of a batch be queued again, with these times; raises BatchNotFoundError and
        BatchConflictError."""
        with self.database.write() as connection:
            locked = hold_batches(connection, [name])
            if not locked:
                raise no_batch(connection, name)
            refuse_deleting(locked[name])
            limits.begin_anew(connection, name)
            connection.execute(
                update(BatchRow)
                .where(BatchRow.name == name)
                .values(cancel_requested_at=None, scheduled_at=None, deadline_at=deadline)
            )

    @retried
    def _ask_to_stop(self, name: str, conditions: tuple[Any, ...], now: datetime) -> int:
        rows = (JobRow.batch == name, *conditions)
        with self.database.write() as connection:
            lock_jobs(connection, *rows)
            return connection.execute(
                update(JobRow)
                .where(*rows)
                .values(cancel_requested_at=func.coalesce(JobRow.cancel_requested_at, now))
            ).rowcount

    @retried
    def change_rows(
        self,
        ids: Sequence[str],
        conditions: tuple[Any, ...],
        values: Mapping[str, Any],
        batch: str | None = None,
    ) -> Sequence[Any]:
        """Update those of these jobs that match, in one transaction; returns (id, model, priority) of each.

        `batch`: raise BatchConflictError if this batch is being deleted.
        """
        changed: list[Any] = []
        if not ids:
            return changed
        with self.database.write() as connection:
            if batch is not None:
                refuse_deleting(hold_batches(connection, [batch]).get(batch))
            for chunk in chunked(ids):
                rows = (JobRow.id.in_(chunk), *conditions)
                lock_jobs(connection, *rows)
                again = values["state"] is JobState.QUEUED
                statement = update(JobRow).where(*rows)
                statement = statement.values(followers.queued_again(values) if again else values)
                returned = (JobRow.id, JobRow.model, JobRow.priority)
                done = connection.execute(statement.returning(*returned)).all()
                if again:
                    partials.forget_ended(connection, chunk)
                    answers.forget(connection, [row.id for row in done])
                    logprobs.forget(connection, [row.id for row in done])
                    followers.hold_again(connection, [row.id for row in done], values["sent_at"])
                else:
                    followers.ended(connection, [row.id for row in done], values["finished_at"])
                changed += done
        return changed


def _with_known(
    connection: Connection, name: str, rows: Sequence[dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Let rows follow those that are in SQL, if another submission has entered some of these meanwhile."""
    numbers = [row["row"] for row in rows]
    query = select(JobRow.row, JobRow.id).where(
        JobRow.batch == name, JobRow.row >= min(numbers), JobRow.row <= max(numbers)
    )
    known = {row.row: row.id for row in connection.execute(query)}
    theirs = {row["id"]: known[row["row"]] for row in rows if row["row"] in known}
    return [row | {"prior": theirs.get(row["prior"], row["prior"])} for row in rows] if theirs else rows
