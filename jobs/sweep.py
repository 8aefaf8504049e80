"""What any live worker does for all jobs: rescue, expire, and find what needs a message.

Sweeps of several workers at once do not disturb one another: rows that one has locked, the others skip.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import exists, or_, select, update

from jobs import partials
from jobs.claims import LIVE_STATES, count_failure
from jobs.contract import JobState, StopReason
from jobs.database import Database
from jobs.store import chunked, lock_jobs
from jobs.tables import JobRow, WorkerRow


@dataclass(frozen=True, slots=True)
class Announcement:
    """Queued jobs that need a message."""

    model: str | None
    priority: int
    job_ids: list[str]


class Sweep:
    """The tables as a whole, as the workers keep them in order."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def rescue(self, stale_after: timedelta) -> list[str]:
        """Take the running jobs from workers that fell silent; returns the ids of jobs queued again."""
        now = self.database.now()
        queued: list[str] = []
        # A worker that was lost (or signed off) may have claimed once more before it died for good.
        owns_jobs = exists().where(JobRow.worker == WorkerRow.id, JobRow.state == JobState.RUNNING)
        with self.database.write() as connection:
            silent = connection.execute(
                select(WorkerRow.id, WorkerRow.host, WorkerRow.pid, WorkerRow.heartbeat_at)
                .where(
                    or_(WorkerRow.state.in_(LIVE_STATES), owns_jobs),
                    WorkerRow.heartbeat_at < now - stale_after,
                )
                .with_for_update(skip_locked=True)
            ).all()
            for worker in silent:
                connection.execute(update(WorkerRow).where(WorkerRow.id == worker.id).values(state="lost"))
                reason = (
                    f"worker {worker.id} (process {worker.pid} on {worker.host}) fell silent: "
                    f"last heartbeat {worker.heartbeat_at.isoformat(timespec='seconds')}"
                )
                rows = connection.execute(
                    select(JobRow.__table__)
                    .where(JobRow.worker == worker.id, JobRow.state == JobState.RUNNING)
                    .order_by(JobRow.id)
                    .with_for_update()
                ).all()
                queued += [row.id for row in rows if count_failure(connection, row, reason, now)]
        return queued

    def expire(self) -> int:
        """End queued jobs whose deadline has passed; returns how many."""
        now = self.database.now()
        late = (JobRow.state == JobState.QUEUED, JobRow.deadline_at.is_not(None), JobRow.deadline_at <= now)
        with self.database.write() as connection:
            lock_jobs(connection, *late)
            expired = connection.execute(
                update(JobRow)
                .where(*late)
                .values(
                    state=JobState.FAILED,
                    stop_reason=StopReason.DEADLINE,
                    error="the deadline passed before a worker began",
                    finished_at=now,
                )
            ).rowcount
            if expired:
                partials.forget_ended(connection)
        return expired

    def unsent(self, limit: int) -> list[Announcement]:
        """Take due queued jobs that no message announces, and mark them as sent."""
        now = self.database.now()
        return self._take_for_sending(
            (JobRow.sent_at.is_(None), or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now)),
            limit,
            now,
        )

    def unanswered(self, model: str | None, older_than: timedelta, limit: int) -> list[Announcement]:
        """Take queued jobs whose message was sent long ago, and mark them as sent again.

        For a queue that is empty: then their message is lost, or held by a worker that is busy. A second
        message does no harm, since only one claim can succeed.
        """
        now = self.database.now()
        of_model = JobRow.model.is_(None) if model is None else JobRow.model == model
        return self._take_for_sending((JobRow.sent_at < now - older_than, of_model), limit, now)

    def _take_for_sending(self, conditions: tuple[Any, ...], limit: int, now: datetime) -> list[Announcement]:
        groups: dict[tuple[str | None, int], list[str]] = {}
        with self.database.write() as connection:
            rows = connection.execute(
                select(JobRow.id, JobRow.model, JobRow.priority)
                .where(JobRow.state == JobState.QUEUED, *conditions)
                .order_by(JobRow.priority.desc(), JobRow.id)
                .limit(limit)
                .with_for_update(skip_locked=True)
            ).all()
            for chunk in chunked(rows):
                connection.execute(
                    update(JobRow).where(JobRow.id.in_([row.id for row in chunk])).values(sent_at=now)
                )
            for row in rows:
                groups.setdefault((row.model, row.priority), []).append(row.id)
        return [Announcement(model, priority, ids) for (model, priority), ids in groups.items()]
