"""The client's statements: insert, read, cancel, retry. Every change of state is a guarded UPDATE.

The worker's half of the state machine (claim, finish, hand back, rescue, sweep) is in `jobs.sql.claims`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    case,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import InstrumentedAttribute

from nightmill.jobs.base.contract import FINAL_STATES, JobState, StopReason
from nightmill.jobs.errors import InvalidTransitionError, JobNotFoundError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql import answers, followers, logprobs
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.locks import hold_batches, lock_ids, refuse_deleting
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.snapshots import read_jobs
from nightmill.jobs.sql.tables import QUEUED, JobRow

JOBS = cast(Table, JobRow.__table__)
CHUNK = 500  # ids in one IN list, below every database's limit of bound parameters
GROUP = 5_000  # rows changed by one transaction, which then blocks others only briefly

FINAL = sorted(FINAL_STATES)
UNFINISHED = (JobState.QUEUED, JobState.RUNNING)

T = TypeVar("T")


def chunked(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Yield lists of at most `size` items."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def by_queue(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str | None, int], list[str]]:
    """Group job ids by (model, priority), which determines the queue of their message."""
    groups: dict[tuple[str | None, int], list[str]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["priority"]), []).append(row["id"])
    return groups


def dialect_insert(connection: Connection, table: Any) -> Any:
    """Return an INSERT that supports ON CONFLICT in this database."""
    make = sqlite_insert if connection.dialect.name == "sqlite" else postgresql_insert
    return make(table)


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of jobs; criteria that are None do not restrict it."""

    ids: Sequence[str] | None = None
    batch: str | None = None
    states: Sequence[JobState] | None = None
    model: str | None = None
    after_id: str | None = None
    before_id: str | None = None
    owner: str | None = None
    request_id: str | None = None

    def conditions(self) -> list[Any]:
        """Return the criteria as SQL expressions over `jobs`."""
        wanted: list[Any] = []
        if self.ids is not None:
            wanted.append(JobRow.id.in_(self.ids))
        if self.batch is not None:
            wanted.append(JobRow.batch == self.batch)
        if self.states is not None:
            wanted.append(JobRow.state.in_([str(state) for state in self.states]))
        if self.model is not None:
            wanted.append(JobRow.model == self.model)
        if self.after_id is not None:
            wanted.append(JobRow.id > self.after_id)
        if self.before_id is not None:
            wanted.append(JobRow.id < self.before_id)
        if self.owner is not None:
            wanted.append(JobRow.owner == self.owner)
        if self.request_id is not None:
            wanted.append(JobRow.request_id == self.request_id)
        return wanted


def tokens_read() -> ColumnElement[int]:
    """Return an expression for the sum of prompt tokens that were computed: those of jobs with at least a
    partial answer.

    A prompt that was refused, or whose job ended while queued, was counted but not computed.
    """
    answered = or_(JobRow.state == JobState.SUCCEEDED, JobRow.completion_tokens > 0)
    return func.coalesce(func.sum(case((answered, JobRow.prompt_tokens))), 0)


class Store:
    """The client's view of the tables."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- writing ---------------------------------------------------------------------------------

    @retried
    def cancel(self, job_id: str) -> JobState:
        """Cancel a queued job now, or ask a running one to stop. Returns the resulting state.

        Cancelling twice changes nothing. Raises JobNotFoundError, and InvalidTransitionError for a job
        that already succeeded or failed.
        """
        now = self.database.now()
        with self.database.write() as connection:
            done = connection.execute(
                update(JobRow)
                .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED)
                .values(**cancelled_values(now))
            )
            if done.rowcount:
                followers.ended(connection, [job_id], now)
                return JobState.CANCELLED
            asked = connection.execute(
                update(JobRow)
                .where(JobRow.id == job_id, JobRow.state == JobState.RUNNING)
                .values(cancel_requested_at=func.coalesce(JobRow.cancel_requested_at, now))
            )
            if asked.rowcount:
                return JobState.RUNNING
            state = self._state_of(connection, job_id)
        if state is not JobState.CANCELLED:
            raise InvalidTransitionError(f"job {job_id} has already {state}: there is nothing to cancel")
        return state

    @retried
    def cancel_all(self, job_ids: Sequence[str]) -> None:
        """Cancel those of these jobs that have not ended, like `cancel`."""
        now = self.database.now()
        for chunk in chunked(job_ids):
            with self.database.write() as connection:
                lock_ids(connection, chunk)
                of_these = JobRow.id.in_(chunk)
                connection.execute(
                    update(JobRow)
                    .where(of_these, JobRow.state == JobState.QUEUED)
                    .values(**cancelled_values(now))
                )
                followers.ended(connection, chunk, now)
                connection.execute(
                    update(JobRow)
                    .where(of_these, JobRow.state == JobState.RUNNING)
                    .values(cancel_requested_at=func.coalesce(JobRow.cancel_requested_at, now))
                )

    @retried
    def retry(self, job_id: str, deadline: datetime | None = None) -> Job:
        """Queue a failed or cancelled job again with all its attempts. Its error history stays.

        An old deadline is dropped (it has passed, or would soon) unless a new one is given. Raises
        JobNotFoundError, InvalidTransitionError in any other state, and BatchConflictError if its batch is
        being deleted.
        """
        now = self.database.now()
        with self.database.write() as connection:
            batch = connection.execute(select(JobRow.batch).where(JobRow.id == job_id)).scalar_one_or_none()
            if batch is not None:
                refuse_deleting(hold_batches(connection, [batch]).get(batch))
            done = connection.execute(
                update(JobRow)
                .where(JobRow.id == job_id, *RETRYABLE)
                .values(followers.queued_again(retried_values(now, deadline)))
            )
            if not done.rowcount:
                state = self._state_of(connection, job_id)
                if state in (JobState.FAILED, JobState.CANCELLED):
                    raise InvalidTransitionError(
                        f"job {job_id} stands for a bad row of a file, and has no prompt: correct the row "
                        "and submit the file as a new batch"
                    )
                raise InvalidTransitionError(
                    f"job {job_id} is {state}: only failed and cancelled jobs can be retried"
                )
            answers.forget(connection, [job_id])
            logprobs.forget(connection, [job_id])
            followers.hold_again(connection, [job_id], now)
        return self.get(job_id)

    # -- reading ---------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """Return one job; raises JobNotFoundError."""
        with self.database.read() as connection:
            found = read_jobs(connection, select(JOBS).where(JobRow.id == job_id))
        if not found:
            raise JobNotFoundError(f"there is no job {job_id!r}")
        return found[0]

    def find(self, selection: Selection, limit: int | None = None, newest_first: bool = False) -> list[Job]:
        """Return jobs in the order of enqueueing."""
        query: Select[Any] = select(JOBS).where(*selection.conditions())
        query = query.order_by(JobRow.id.desc() if newest_first else JobRow.id)
        if limit is not None:
            query = query.limit(limit)
        with self.database.read() as connection:
            return read_jobs(connection, query)

    def ids(self, selection: Selection, limit: int) -> list[str]:
        """Return ids in the order of enqueueing."""
        query = select(JobRow.id).where(*selection.conditions()).order_by(JobRow.id).limit(limit)
        with self.database.read() as connection:
            return list(connection.execute(query).scalars())

    def finished_since(
        self, selection: Selection, since: tuple[datetime, str] | None, limit: int
    ) -> list[Job]:
        """Return final jobs ordered by (finished_at, id), starting after `since`."""
        query = select(JOBS).where(*selection.conditions(), JobRow.finished_at.is_not(None))
        if since is not None:
            moment, job_id = since
            query = query.where(
                or_(
                    JobRow.finished_at > moment,
                    and_(JobRow.finished_at == moment, JobRow.id > job_id),
                )
            )
        query = query.order_by(JobRow.finished_at, JobRow.id).limit(limit)
        with self.database.read() as connection:
            return read_jobs(connection, query)

    @long_lasting
    def count(self, selection: Selection) -> int:
        """Count the selected jobs."""
        query = select(func.count()).select_from(JobRow).where(*selection.conditions())
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def count_queued(self, owner: str) -> int:
        """Count the queued jobs of this owner."""
        query = select(func.count()).select_from(JobRow).where(JobRow.owner == owner, QUEUED)
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def count_unfinished(self, selection: Selection) -> int:
        """Count the selected jobs that are not final."""
        return self.count(replace(selection, states=UNFINISHED))

    def missing(self, job_ids: Sequence[str]) -> list[str]:
        """Return those of `job_ids` (at most CHUNK) that do not exist."""
        with self.database.read() as connection:
            found = set(connection.execute(select(JobRow.id).where(JobRow.id.in_(job_ids))).scalars())
        return [job_id for job_id in job_ids if job_id not in found]

    def states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return the states of these jobs (at most CHUNK), without unknown ones."""
        with self.database.read() as connection:
            query = select(JobRow.id, JobRow.state).where(JobRow.id.in_(job_ids))
            return {row.id: JobState.read(row.state) for row in connection.execute(query)}

    def has_key(self, idempotency_key: str) -> bool:
        """Return True if a job has this idempotency key."""
        query = select(JobRow.id).where(JobRow.idempotency_key == idempotency_key)
        with self.database.read() as connection:
            return connection.execute(query).one_or_none() is not None

    @long_lasting
    def counts(self, batch: str | None = None) -> dict[str, dict[str, int]]:
        """Count jobs: {"state": {...}, "stop_reason": {...}}."""
        counted: dict[str, dict[str, int]] = {}
        columns: list[InstrumentedAttribute[Any]] = [JobRow.state, JobRow.stop_reason]
        with self.database.read() as connection:
            for column in columns:
                query = select(column, func.count()).where(column.is_not(None)).group_by(column)
                if batch is not None:
                    query = query.where(JobRow.batch == batch)
                counted[column.key] = dict(map(tuple, connection.execute(query)))
        return counted

    @long_lasting
    def tokens(self, batch: str | None = None) -> tuple[int, int]:
        """Return the sums of computed prompt tokens and of completion tokens over finished jobs."""
        query = select(
            tokens_read(),
            func.coalesce(func.sum(JobRow.completion_tokens), 0),
        )
        if batch is not None:
            query = query.where(JobRow.batch == batch)
        with self.database.read() as connection:
            row = connection.execute(query).one()
        return int(row[0] or 0), int(row[1] or 0)

    # -- helpers ---------------------------------------------------------------------------------

    @staticmethod
    def _state_of(connection: Connection, job_id: str) -> JobState:
        state = connection.execute(select(JobRow.state).where(JobRow.id == job_id)).scalar_one_or_none()
        if state is None:
            raise JobNotFoundError(f"there is no job {job_id!r}")
        return JobState(state)


@retried
def mark_unsent(database: Database, job_ids: Sequence[str]) -> None:
    """Record that no message announces these jobs, so that a worker's sweep will send one."""
    for chunk in chunked(job_ids):
        with database.write() as connection:
            lock_ids(connection, chunk)
            connection.execute(
                update(JobRow)
                .where(JobRow.id.in_(chunk), JobRow.state == JobState.QUEUED)
                .values(sent_at=None)
            )


RETRYABLE = (
    JobRow.state.in_([JobState.FAILED, JobState.CANCELLED]),
    # Excludes bad rows of a file.
    or_(
        *(JobRow.prompt.is_not(None), JobRow.messages.is_not(None), JobRow.prompt_ids.is_not(None)),
        JobRow.held.is_not(None),
    ),
)


def retried_values(now: datetime, deadline: datetime | None) -> dict[str, Any]:
    """Return the columns that queue a job again; its id, seed and error history stay."""
    return {
        "state": JobState.QUEUED,
        "failures": 0,
        "suspects": None,
        "worker": None,
        "sent_at": now,
        "scheduled_at": None,
        "deadline_at": deadline,
        "cancel_requested_at": None,
        "stop_reason": None,
        "text": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "cached_tokens": None,
        "reasoning_tokens": None,
        "arithmetic": None,
        "prompt_digest": None,
        "reused_from": None,
        "markup": None,
        "error": None,
        "started_at": None,
        "finished_at": None,
    }


def cancelled_values(now: datetime) -> dict[str, Any]:
    """Return the columns that cancel a queued job."""
    return {
        "state": JobState.CANCELLED,
        "stop_reason": StopReason.CANCELLED,
        "cancel_requested_at": now,
        "finished_at": now,
    }
