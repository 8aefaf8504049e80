"""What any live worker does for all jobs: rescue, expire, and find what needs a message.

Sweeps of several workers at once do not disturb one another: rows that one has locked, the others skip.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, product
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, exists, func, or_, select, update

from nightmill.jobs.contract import JobState, StopReason, WorkerState
from nightmill.jobs.fields import INTERACTIVE
from nightmill.jobs.sql import partials, suspects
from nightmill.jobs.sql.claims import hand_back
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import GROUP, by_queue, chunked
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.settling import settle_heartbeats, settle_sendings
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow, WorkerRow
from nightmill.jobs.sql.workers import LIVE

_PRIORITIES = range(INTERACTIVE, -1, -1)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Queued jobs that need a message."""

    model: str | None
    priority: int
    job_ids: list[str]


class ClockWatch:
    """Notices that the database's clock was set, or stood still for this host while it was suspended.

    Then live workers look silent, until each has had the time for a heartbeat.
    """

    def __init__(self) -> None:
        self._last: tuple[datetime, float] | None = None
        self._wait_until = float("-inf")

    def trusted(self, time: datetime, monotonic: float, stale_after: timedelta) -> bool:
        """False from when a step was seen until `stale_after` has gone by. Ask in every round."""
        if self._last is not None:
            then, counted = self._last
            step = (time - then).total_seconds() - (monotonic - counted)
            if abs(step) > stale_after.total_seconds() / 2:  # less makes nobody look silent who beats in time
                self._wait_until = monotonic + stale_after.total_seconds()
        self._last = (time, monotonic)
        return monotonic >= self._wait_until


class Sweep:
    """The tables as a whole, as the workers keep them in order."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._clock_watch = ClockWatch()

    def rescue(self, stale_after: timedelta, *, rescuer: str = "") -> list[str]:
        """Take the running jobs from workers that fell silent; returns the ids of jobs queued again.

        Never from the worker that asks, `rescuer`, whatever its row says: it lives. A worker's jobs are
        suspects of its death: see `suspects.charge`. Each worker in a transaction of its own, which locks its
        jobs in the order of their ids as everybody does: two workers' jobs in one transaction would be locked
        in two such orders.
        """
        settle_heartbeats(self.database)
        time = self.database.read_clock()  # what is old goes by it, also in a process that still counts on
        if not self._clock_watch.trusted(time, self.database.monotonic(), stale_after):
            return []
        queued: list[str] = []
        while (taken := self._rescue_one(stale_after, rescuer)) is not None:
            queued += taken
        return queued

    @retried
    def _rescue_one(self, stale_after: timedelta, rescuer: str) -> list[str] | None:
        """Take the jobs of one silent worker; None if there is no such worker."""
        # A worker that was lost (or signed off) may have claimed once more before it died for good.
        owns_jobs = exists().where(JobRow.worker == WorkerRow.id, RUNNING)
        with self.database.write() as connection:
            worker = connection.execute(
                select(WorkerRow.id, WorkerRow.host, WorkerRow.pid, WorkerRow.heartbeat_at)
                .where(
                    or_(WorkerRow.state.in_(LIVE), owns_jobs),
                    WorkerRow.heartbeat_at < self.database.clock_time(ago=stale_after),
                    WorkerRow.id != rescuer,
                )
                .order_by(WorkerRow.id)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).one_or_none()
            if worker is None:
                return None
            connection.execute(
                update(WorkerRow).where(WorkerRow.id == worker.id).values(state=WorkerState.LOST)
            )
            reason = (
                f"worker {worker.id} (process {worker.pid} on {worker.host}) fell silent: "
                f"last heartbeat {worker.heartbeat_at.isoformat(timespec='seconds')}"
            )
            rows = suspects.running_jobs(connection, worker.id)
            return suspects.charge(connection, rows, reason, self.database.now())

    @retried
    def bury(self, worker_id: str, *, blame: bool) -> int:
        """The caller knows that this worker's process has ended: take its jobs without waiting for silence.

        blame: one of the jobs may have been the cause, so they are treated as by `rescue`; else they are
        queued again as they were. Returns how many jobs were taken.
        """
        now = self.database.now()
        with self.database.write() as connection:
            connection.execute(
                update(WorkerRow)
                .where(WorkerRow.id == worker_id, WorkerRow.state.in_(LIVE))
                .values(state=WorkerState.LOST)
            )
            rows = suspects.running_jobs(connection, worker_id)
            if blame:
                suspects.charge(connection, rows, f"worker {worker_id} has died", now)
            else:
                for row in rows:
                    hand_back(connection, (JobRow.id == row.id, RUNNING, JobRow.attempt == row.attempt), now)
            partials.forget_ended(connection, [row.id for row in rows])
        return len(rows)

    @retried
    def expire(self, groups: int | None = None) -> int:
        """End queued jobs whose deadline has passed, in so many groups at most; returns how many."""
        now = self.database.now()
        expired = 0
        for done in count(1):
            with self.database.write() as connection:
                late = connection.execute(
                    select(JobRow.id)
                    .where(QUEUED, JobRow.deadline_at.is_not(None), JobRow.deadline_at <= now)
                    .order_by(JobRow.deadline_at)
                    .limit(GROUP)
                    .with_for_update(skip_locked=True)
                ).all()
                for chunk in chunked(sorted(row.id for row in late)):
                    expired += connection.execute(
                        update(JobRow)
                        .where(JobRow.id.in_(chunk), QUEUED)
                        .values(
                            state=JobState.FAILED,
                            stop_reason=StopReason.DEADLINE,
                            error="the deadline passed before a worker began",
                            finished_at=now,
                        )
                    ).rowcount
                    partials.forget_ended(connection, chunk)
            if len(late) < GROUP or done == groups:
                return expired
        raise AssertionError("unreachable")

    @retried
    def unsent(self, limit: int) -> list[Announcement]:
        """Take due queued jobs that no message announces, and mark them as sent; the most urgent first."""
        now = self.database.now()
        due = [JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now]
        alternatives = [
            (priority, [JobRow.sent_at.is_(None), when]) for priority, when in product(_PRIORITIES, due)
        ]
        with self.database.write() as connection:
            return _take_for_sending(connection, alternatives, (JobRow.scheduled_at, JobRow.id), limit, now)

    @retried
    def unanswered(
        self,
        model: str | None,
        older_than: timedelta,
        limit: int,
        heads: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> list[Announcement]:
        """Take queued jobs whose message is lost, or held by a worker that is busy; mark them as sent again.

        heads  for each priority at which messages wait in the queue, the jobs of the next one

        Messages leave a queue in the order in which they came. So if none waits, every message that was
        sent is out of it; if some wait, all that were sent before the next one. That finds what a killed
        worker had taken, though the queue never becomes empty, and gives no job a second message while its
        first waits, for hours perhaps. A second one does no harm, since only one claim can succeed.
        """
        now = self.database.now()
        of_model = JobRow.model.is_(None) if model is None else JobRow.model == model
        with self.database.write() as connection:
            for priority in _PRIORITIES:  # each walks the end of an index
                settle_sendings(
                    self.database,
                    connection,
                    *(QUEUED, of_model, JobRow.sent_at.is_not(None), JobRow.priority == priority),
                )
            before = {priority: _sent_at(connection, job_ids) for priority, job_ids in heads.items()}
            alternatives = [
                (priority, [of_model, JobRow.sent_at.is_not(None), JobRow.sent_at < sent - older_than])
                for priority in _PRIORITIES
                if (sent := before.get(priority, now)) is not None
            ]
            return _take_for_sending(connection, alternatives, (JobRow.sent_at, JobRow.id), limit, now)


def _sent_at(connection: Connection, job_ids: Sequence[str]) -> datetime | None:
    """When the message of these jobs was sent; None if none of them is known any more."""
    sent: datetime | None = connection.execute(
        select(func.min(JobRow.sent_at)).where(JobRow.id.in_(job_ids))
    ).scalar_one()
    return sent


def _take_for_sending(
    connection: Connection,
    alternatives: Sequence[tuple[int, list[Any]]],
    order: tuple[Any, ...],
    limit: int,
    now: datetime,
) -> list[Announcement]:
    """Take up to `limit` queued jobs that fit one of the alternatives: a priority, and further conditions.

    No suspects: workers look for these themselves.
    One query for each, so that it walks an index in its order and ends at the limit, however many jobs wait.
    """
    taken: list[Any] = []
    left = limit
    for priority, conditions in alternatives:
        if left == 0:
            break
        rows = connection.execute(
            select(JobRow.id, JobRow.model, JobRow.priority)
            .where(QUEUED, JobRow.suspects.is_(None), JobRow.priority == priority, *conditions)
            .order_by(*order)
            .limit(left)
            .with_for_update(skip_locked=True)
        ).all()
        left -= len(rows)
        for chunk in chunked(rows):
            connection.execute(
                update(JobRow).where(JobRow.id.in_([row.id for row in chunk])).values(sent_at=now)
            )
        taken += rows
    groups = by_queue(row._mapping for row in taken)
    return [Announcement(model, priority, ids) for (model, priority), ids in groups.items()]
