"""Reads of whole batches: their state, their rows in order, counts and pace."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.reply.batch_status import BatchRecord, ErrorGroup, Pace, RowCount, group_errors
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql import followers
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import CHUNK, GROUP, JOBS, UNFINISHED, chunked, tokens_read
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.snapshots import read_jobs
from nightmill.jobs.sql.tables import RUNNING, BatchRow, JobRow

BATCHES = cast(Table, BatchRow.__table__)
RECENT = timedelta(seconds=60)  # the period of the recent pace
_MOST_ERRORS = 10
_MOST_MESSAGES = 2_000  # distinct messages that are read for grouping
_MOST_COMPARED = 1_000  # newest batches whose names may be meant by an unknown one
_LONGEST_COMPARED = 200  # characters of that name
_ALIKE = 0.8  # difflib's ratio; below it a suggestion misleads more often than it helps
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


class BatchReader:
    """The batches in SQL, as they are."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, name: str) -> BatchRecord:
        """Return a batch; raises BatchNotFoundError."""
        with self.database.read() as connection:
            return batch_in(connection, name)

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

    def arithmetic(self, name: str) -> str | None:
        """Return the arithmetic of the row that was computed first; None if none was, or it was not recorded.

        Answers that were there already (`--reuse`) may be of any file.
        """
        computed = JobRow.state == JobState.SUCCEEDED, JobRow.reused_from.is_(None)
        first = (
            select(JobRow.arithmetic)
            .where(JobRow.batch == name, JobRow.finished_at.is_not(None), *computed)
            .order_by(JobRow.finished_at)
            .limit(1)
        )
        with self.database.read() as connection:
            return connection.execute(first).scalar_one_or_none()

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

    def last_row(self, name: str) -> int:
        """Return the number of the last entered row, 0 if there is none. All rows before it are entered,
        too."""
        query = select(func.max(JobRow.row)).where(JobRow.batch == name, JobRow.row.is_not(None))
        with self.database.read() as connection:
            return connection.execute(query).scalar_one() or 0

    def _any(self, name: str, condition: Any) -> bool:
        with self.database.read() as connection:
            query = select(JobRow.id).where(JobRow.batch == name, condition).limit(1)
            return connection.execute(query).one_or_none() is not None


def batch_in(connection: Connection, name: str) -> BatchRecord:
    """Return a batch; raises BatchNotFoundError."""
    row = connection.execute(select(*_RECORD).where(BatchRow.name == name)).mappings().one_or_none()
    if row is None:
        raise no_batch(connection, name)
    return BatchRecord(**row)


def no_batch(connection: Connection, name: str) -> BatchNotFoundError:
    """Return the error for an unknown batch, with a name that is alike among the newest ones."""
    newest = select(BatchRow.name).order_by(BatchRow.created_at.desc()).limit(_MOST_COMPARED)
    known = list(connection.execute(newest).scalars())
    longer = [one for one in known if name and one.startswith(name)]  # as names of files' batches are
    close = longer or difflib.get_close_matches(name[:_LONGEST_COMPARED], known, n=1, cutoff=_ALIKE)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return BatchNotFoundError(
        f"there is no batch {name!r}: {hint}`nightmill batch list` shows those there are"
    )
