"""Maintenance by any live worker for all jobs: rescue, expiry, and missing messages.

Concurrent sweeps do not block each other: each skips rows locked by another.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import count, product
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, exists, func, or_, select, update

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql import followers, suspects
from nightmill.jobs.sql.claims import hand_back
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.flows import Announcement
from nightmill.jobs.sql.jobs import GROUP, by_queue, chunked
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.settling import settle_heartbeats, settle_sendings
from nightmill.jobs.sql.tables import QUEUED, RUNNING, BatchRow, JobRow, WorkerRow
from nightmill.jobs.sql.workers import LIVE

_PRIORITIES = range(INTERACTIVE, -1, -1)


class ClockWatch:
    """Detects that the database's clock was set, or that this host was suspended.

    Live workers then look silent until each has had time for a heartbeat.
    """

    def __init__(self) -> None:
        self._last: tuple[datetime, float] | None = None
        self._wait_until = float("-inf")

    def trusted(self, time: datetime, monotonic: float, stale_after: timedelta) -> bool:
        """Return False from a detected step until `stale_after` has passed. Call it in every round."""
        if self._last is not None:
            then, counted = self._last
            step = (time - then).total_seconds() - (monotonic - counted)
            # A smaller step does not make a punctual worker look silent.
            if abs(step) > stale_after.total_seconds() / 2:
                self._wait_until = monotonic + stale_after.total_seconds()
        self._last = (time, monotonic)
        return monotonic >= self._wait_until


class Sweep:
    """Maintenance of the tables by workers."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._clock_watch = ClockWatch()
        self._followers_after: tuple[str, str] | None = None

    def rescue(self, stale_after: timedelta, *, rescuer: str = "") -> list[str]:
        """Take the running jobs from workers that fell silent; returns the ids of jobs queued again.

        Never from `rescuer`, which is alive whatever its row says. A dead worker's jobs become suspects, see
        `suspects.charge`. Each worker is handled in a transaction of its own, which locks jobs in the order
        of their ids; two workers' jobs in one transaction could break that order.
        """
        settle_heartbeats(self.database)
        time = self.database.read_clock()  # read anew, as ages must not rely on an extrapolated clock
        if not self._clock_watch.trusted(time, self.database.monotonic(), stale_after):
            return []
        queued: list[str] = []
        while (taken := self._rescue_one(stale_after, rescuer)) is not None:
            queued += taken
        return queued

    @retried
    def _rescue_one(self, stale_after: timedelta, rescuer: str) -> list[str] | None:
        """Take the jobs of one silent worker; None if there is no such worker."""
        # A worker that was lost or signed off may have claimed jobs again before it died.
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
        """Take the jobs of a worker whose process is known to have ended, without waiting for silence.

        blame: a job may have caused the death, so they are handled like in `rescue`; otherwise they are
        queued again as they were. Returns the number of jobs.
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
                    connection.execute(
                        update(JobRow).where(JobRow.id == row.id, RUNNING).values(**suspects.UNCOUNTED)
                    )
                    hand_back(connection, (JobRow.id == row.id, RUNNING, JobRow.attempt == row.attempt), now)
            followers.ended(connection, [row.id for row in rows], now)
        return len(rows)

    @retried
    def expire(self, groups: int | None = None) -> int:
        """End queued jobs whose deadline has passed, in at most this many groups; returns their number."""
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
                    followers.ended(connection, chunk, now)
            if len(late) < GROUP or done == groups:
                return expired
        raise AssertionError("unreachable")

    @retried
    def settle_followers(self) -> int:
        """Settle followers whose priors ended unnoticed, as by a worker of an older version.

        Each call looks at a page of those that are held, behind that of the last call. Returns the number of
        followers that are due now; they have no message yet.
        """
        with self.database.read() as connection:
            priors, after = followers.overlooked(connection, self._followers_after, GROUP)
        due = 0
        if priors:
            with self.database.write() as connection:
                followers.lock_priors(connection, priors)  # none is retried meanwhile
                due = len(followers.settle(connection, priors, self.database.now()))
        self._followers_after = after
        return due

    @retried
    def end_stopped(self, groups: int | None = None) -> int:
        """End the queued rows of batches that a limit has stopped, in at most this many groups; returns their
        number."""
        now, ended, done = self.database.now(), 0, 0
        while groups is None or done < groups:
            done += 1
            with self.database.write() as connection:
                queued = exists().where(JobRow.batch == BatchRow.name, QUEUED)
                stopped = select(BatchRow.name, BatchRow.stopped_because)
                stopped = stopped.where(BatchRow.stopped_at.is_not(None), queued).order_by(BatchRow.name)
                # Held, so that whoever lets it go on finds all rows that were ended.
                held = stopped.limit(1).with_for_update(read=True, of=BatchRow)
                batch = connection.execute(held).one_or_none()
                if batch is None:
                    break
                rows = select(JobRow.id).where(JobRow.batch == batch.name, QUEUED).limit(GROUP)
                ids = sorted(connection.execute(rows.with_for_update(skip_locked=True)).scalars())
                why = (batch.stopped_because or "").partition("; ")[0]
                for chunk in chunked(ids):
                    ended += connection.execute(
                        update(JobRow)
                        .where(JobRow.id.in_(chunk), QUEUED)
                        .values(
                            state=JobState.FAILED,
                            stop_reason=StopReason.BUDGET,
                            error=f"the batch stopped before a worker began: {why}",
                            finished_at=now,
                        )
                    ).rowcount
                    followers.ended(connection, chunk, now)
            if not ids:  # others are at it
                break
        return ended

    @retried
    def unsent(self, limit: int, priorities: Sequence[int] = _PRIORITIES) -> list[Announcement]:
        """Take due queued jobs without a message, most urgent first, and mark them as sent."""
        now = self.database.now()
        due = [JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now]
        alternatives = [
            (priority, [JobRow.sent_at.is_(None), when]) for priority, when in product(priorities, due)
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
        """Take queued jobs whose message is lost, or kept by a busy worker, and mark them as sent again.

        heads  job ids of the next message by priority, for priorities with messages in the queue

        A queue is first in, first out. So if it is empty, every sent message has left it; otherwise, all
        messages sent before the next one have. This finds messages taken by a killed worker even if the queue
        never becomes empty, and sends no second message while the first one waits, perhaps for hours. A
        second one would be harmless, since only one claim can succeed.
        """
        now = self.database.now()
        of_model = JobRow.model.is_(None) if model is None else JobRow.model == model
        with self.database.write() as connection:
            for priority in _PRIORITIES:  # each reads one end of an index
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
    """Return when the message of these jobs was sent; None if none of them exists any more."""
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
    """Take up to `limit` queued jobs that match one of the alternatives: a priority and further conditions.

    Suspects are excluded, as workers search for these themselves. Each alternative is a query of its own,
    which walks an index in order and ends at the limit, however many jobs are queued.
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
