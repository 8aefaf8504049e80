"""Statements about whole batches: entering rows, counting, reading in order, cancelling, retrying.

Changes to up to a million rows are made in groups, a transaction each, so that they block nobody for long.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table, func, or_, select, text, update
from sqlalchemy.orm import InstrumentedAttribute

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.stepping import exhaust
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.reply.batch_status import BatchRecord, ErrorGroup, Pace, RowCount, group_errors
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql import answers, followers, limits, logprobs, partials
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import (
    CHUNK,
    FINAL,
    GROUP,
    JOBS,
    RETRYABLE,
    UNFINISHED,
    by_queue,
    cancelled_values,
    chunked,
    dialect_insert,
    retried_values,
    tokens_read,
)
from nightmill.jobs.sql.locks import hold_batches, lock_jobs, refuse_deleting
from nightmill.jobs.sql.many import insert_jobs
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.snapshots import read_jobs
from nightmill.jobs.sql.tables import QUEUED, RUNNING, BatchRow, JobRow

BATCHES = cast(Table, BatchRow.__table__)
RECENT = timedelta(seconds=60)  # the period of the recent pace
_MOST_ERRORS = 10
_MANY_ROWS = 2_000
_MOST_MESSAGES = 2_000  # distinct messages that are read for grouping

UNSUCCESSFUL = (JobState.FAILED, JobState.CANCELLED)
_UNFINISHED_ROW = JobRow.state.in_(UNFINISHED)
_RECORD = [column for column in BATCHES.columns if column.key != "metadata"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A row of a batch that has ended."""

    row: int
    job_id: str
    finished_at: datetime


class Prior(NamedTuple):
    """A row that others may follow."""

    row: int
    job_id: str
    custom_id: str | None
    metadata: dict[str, Any] | None


class BatchStore:
    """The batches in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

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
                    return _get(connection, record.name), entered is not None

    def last_row(self, name: str) -> int:
        """Return the number of the last entered row, 0 if there is none. All rows before it are entered,
        too."""
        query = select(func.max(JobRow.row)).where(JobRow.batch == name, JobRow.row.is_not(None))
        with self.database.read() as connection:
            return connection.execute(query).scalar_one() or 0

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

    # -- reading ---------------------------------------------------------------------------------

    def get(self, name: str) -> BatchRecord:
        """Return a batch; raises BatchNotFoundError."""
        with self.database.read() as connection:
            return _get(connection, name)

    def newest(self, limit: int) -> list[BatchRecord]:
        """Return the newest batches, newest first."""
        query = select(*_RECORD).order_by(BatchRow.created_at.desc(), BatchRow.name).limit(limit)
        with self.database.read() as connection:
            return [BatchRecord(**row) for row in connection.execute(query).mappings()]

    def running(self, limit: int) -> list[BatchRecord]:
        """Return batches with running rows, newest first."""
        running = select(JobRow.batch).where(RUNNING, JobRow.batch.is_not(None)).distinct()
        query = select(*_RECORD).where(BatchRow.name.in_(running))
        query = query.order_by(BatchRow.created_at.desc(), BatchRow.name).limit(limit)
        with self.database.read() as connection:
            return [BatchRecord(**row) for row in connection.execute(query).mappings()]

    def end(self, name: str) -> tuple[BatchRecord, datetime | None] | None:
        """Return a version stamp of a finished batch; None if rows are unfinished.

        Raises BatchNotFoundError.
        """
        record = self.get(name)
        if record.deleting_at is not None or self.unfinished(name):
            return None
        last = select(JobRow.finished_at).where(JobRow.batch == name, JobRow.finished_at.is_not(None))
        with self.database.read() as connection:
            found = connection.execute(last.order_by(JobRow.finished_at.desc()).limit(1)).scalar_one_or_none()
        return record, found

    @long_lasting
    def counts(self, name: str) -> list[RowCount]:
        """Count rows by state and stop reason, with their tokens."""
        columns = (JobRow.state, JobRow.stop_reason)
        query = (
            select(
                *columns,
                func.count().label("rows"),
                tokens_read().label("prompt_tokens"),
                func.coalesce(func.sum(JobRow.completion_tokens), 0).label("completion_tokens"),
                func.coalesce(func.sum(JobRow.cached_tokens), 0).label("cached_tokens"),
                func.coalesce(func.sum(JobRow.reasoning_tokens), 0).label("reasoning_tokens"),
                func.coalesce(func.sum(JobRow.gpu_seconds), 0.0).label("gpu_seconds"),
                func.sum(JobRow.energy_joules).label("energy_joules"),
                func.coalesce(func.sum(JobRow.uncounted_attempts), 0).label("uncounted_attempts"),
            )
            .where(JobRow.batch == name)
            .group_by(*columns)
        )
        with self.database.read() as connection:
            return [
                RowCount(
                    JobState.read(row.state),
                    StopReason.read(row.stop_reason) if row.stop_reason else None,
                    row.rows,
                    int(row.prompt_tokens),
                    int(row.completion_tokens),
                    int(row.cached_tokens),
                    int(row.reasoning_tokens),
                    float(row.gpu_seconds),
                    row.energy_joules,
                    int(row.uncounted_attempts),
                )
                for row in connection.execute(query)
            ]

    def recent_pace(self, name: str) -> Pace | None:
        """Return the pace of the last minute, or since the batch began if that is shorter."""
        now = self.database.now()
        begin = now - RECENT
        return self._pace(name, (JobRow.finished_at > begin,), begin, now)

    def whole_pace(self, name: str) -> Pace | None:
        """Return the pace from the first start to the last end; reads all rows of the batch."""
        return self._pace(name, (JobRow.finished_at.is_not(None),), None, None)

    @long_lasting
    def _pace(
        self, name: str, conditions: tuple[Any, ...], begin: datetime | None, end: datetime | None
    ) -> Pace | None:
        query = select(
            func.count(),
            func.coalesce(func.sum(JobRow.completion_tokens), 0),
            func.min(JobRow.started_at),
            func.max(JobRow.finished_at),
        ).where(JobRow.batch == name, JobRow.started_at.is_not(None), *conditions)
        with self.database.read() as connection:
            rows, tokens, started, finished = connection.execute(query).one()
        if started is None or finished is None:
            return None
        begin = started if begin is None else max(begin, started)
        return Pace(rows, int(tokens or 0), ((end or finished) - begin).total_seconds())

    @long_lasting
    def error_groups(self, name: str) -> list[ErrorGroup]:
        """Return the most frequent errors of rows that ended without success."""
        message = func.substr(JobRow.error, 1, 300).label("message")
        query = (
            select(message, func.count().label("rows"))
            .where(JobRow.batch == name, JobRow.state == JobState.FAILED, JobRow.error.is_not(None))
            .group_by("message")
            .order_by(func.count().desc())
            .limit(_MOST_MESSAGES)
        )
        with self.database.read() as connection:
            return group_errors(((row.message, row.rows) for row in connection.execute(query)), _MOST_ERRORS)

    def finished_since(self, name: str, since: datetime | None) -> Iterator[Finished]:
        """Yield rows of a submitted batch that ended after `since`, oldest first, without their contents."""
        mark: tuple[datetime, str] | None = None
        while True:
            query: Any = select(JobRow.row, JobRow.id, JobRow.finished_at).where(
                JobRow.batch == name, JobRow.finished_at.is_not(None), JobRow.row.is_not(None)
            )
            if mark is not None:
                moment, job_id = mark
                query = query.where(
                    JobRow.finished_at >= moment,
                    or_(JobRow.finished_at > moment, JobRow.id > job_id),
                )
            elif since is not None:
                query = query.where(JobRow.finished_at > since)
            query = query.order_by(JobRow.finished_at, JobRow.id).limit(GROUP)
            with self.database.read() as connection:
                page = [Finished(*row) for row in connection.execute(query)]
            yield from page
            if len(page) < GROUP:
                return
            mark = (page[-1].finished_at, page[-1].job_id)

    def ids(self, name: str, *states: JobState) -> Iterator[str]:
        """Yield ids of the jobs in these states, in order."""
        for page in self._pages(name, JobRow.id):
            yield from (row.id for row in page if row.state in states)

    def in_order(self, name: str, states: Sequence[JobState]) -> Iterator[Job]:
        """Yield jobs in these states in the order of the file, or of enqueueing if there is none."""
        by_row = self.get(name).format is not None
        for page in self._pages(name, JobRow.row if by_row else JobRow.id):
            for ids in chunked((row.id for row in page if row.state in states), CHUNK):
                with self.database.read() as connection:
                    query = select(JOBS).where(JobRow.id.in_(ids), JobRow.state.in_(states))
                    found = read_jobs(connection, query)
                yield from sorted(found, key=lambda job: (job.row or 0) if by_row else job.id)

    def priors(self, name: str) -> Iterator[Prior]:
        """Yield all rows of a submitted batch in the order of the file, for those that follow them."""
        for page in self._pages(name, JobRow.row):
            for ids in chunked((row.id for row in page), CHUNK):
                query = select(JobRow.row, JobRow.id, JobRow.custom_id, JOBS.c.metadata)
                with self.database.read() as connection:
                    found = connection.execute(query.where(JobRow.id.in_(ids)).order_by(JobRow.row)).all()
                yield from (Prior(*row) for row in found)

    def custom_ids(self, name: str, first: int = 1, last: int | None = None) -> Iterator[tuple[str, str]]:
        """Yield (custom_id, job id) of the rows from `first` to `last`."""
        while True:
            query = select(JobRow.row, JobRow.custom_id, JobRow.id).where(
                JobRow.batch == name, JobRow.row >= first, *([] if last is None else [JobRow.row <= last])
            )
            with self.database.read() as connection:
                page = connection.execute(query.order_by(JobRow.row).limit(GROUP)).all()
            yield from ((row.custom_id, row.id) for row in page if row.custom_id is not None)
            if len(page) < GROUP:
                return
            first = page[-1].row + 1

    def pages_of_ids(self, name: str, states: Sequence[JobState]) -> Iterator[list[str]]:
        """Yield pages of the ids of jobs in these states, in order; pages may be empty."""
        for page in self._pages(name, JobRow.id):
            yield [row.id for row in page if row.state in states]

    def _pages(self, name: str, place: InstrumentedAttribute[Any]) -> Iterator[Sequence[Any]]:
        """Yield pages of (id, state, place) of a batch's jobs in the order of `place`.

        No other condition is used: if PostgreSQL took it for selective, it would sort the whole batch for
        every page instead of walking the index.
        """
        last: Any = "" if place is JobRow.id else 0
        while True:
            query = select(JobRow.id, JobRow.state, place.label("place"))
            query = query.where(JobRow.batch == name, place > last).order_by(place).limit(GROUP)
            with self.database.read() as connection:
                page = connection.execute(query).all()
            yield page
            if len(page) < GROUP:
                return
            last = page[-1].place

    def held(self, name: str) -> int:
        """Return the number of rows that wait for the ones that they follow."""
        with self.database.read() as connection:
            return followers.count_held(connection, name)

    def unfinished(self, name: str) -> bool:
        """Return True if a row has not ended."""
        return self._any(name, _UNFINISHED_ROW)

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

    def _any(self, name: str, condition: Any) -> bool:
        with self.database.read() as connection:
            query = select(JobRow.id).where(JobRow.batch == name, condition).limit(1)
            return connection.execute(query).one_or_none() is not None

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
                raise no_batch(name)
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


def _get(connection: Connection, name: str) -> BatchRecord:
    row = connection.execute(select(*_RECORD).where(BatchRow.name == name)).mappings().one_or_none()
    if row is None:
        raise no_batch(name)
    return BatchRecord(**row)


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


def no_batch(name: str) -> BatchNotFoundError:
    """Return the error for an unknown batch."""
    return BatchNotFoundError(f"there is no batch {name!r}: `nightmill batch list` shows those there are")
