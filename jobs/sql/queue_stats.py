"""Statistics of a database for monitoring, by model: jobs, ages of queues, workers."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import case, func, or_, select

from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import tokens_read
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow, WorkerRow
from nightmill.jobs.sql.workers import LIVE

SILENT = "silent"
"""Reported state of a live worker without heartbeats that no sweep has found yet."""

Model = str | None
_LOOKED_AT = 20_000  # queued rows of a batch that are searched for models


@dataclass(frozen=True, slots=True)
class QueuedJobs:
    """The queued jobs of a model, including scheduled ones."""

    jobs: int
    suspects: int  # those in flight when a worker died
    age: float  # seconds since the oldest became claimable; 0 if none is


@dataclass(frozen=True, slots=True)
class EndedJobs:
    """Jobs that have ended."""

    jobs: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    gpu_seconds: float = 0.0
    energy_joules: float = 0.0  # as far as it is known


class QueueStats:
    """Counting queries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @long_lasting
    def queued(self) -> dict[Model, QueuedJobs]:
        """Count queued jobs by model; reads queued jobs only."""
        now = self._database.now()
        since = func.coalesce(JobRow.scheduled_at, JobRow.created_at)
        due = or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now)
        query = (
            select(
                JobRow.model,
                func.count().label("jobs"),
                func.count(JobRow.suspects).label("suspects"),
                func.min(case((due, since))).label("since"),
            )
            .where(QUEUED)
            .group_by(JobRow.model)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return {
            row.model: QueuedJobs(
                row.jobs,
                row.suspects,
                0.0 if row.since is None else max(0.0, (now - row.since).total_seconds()),
            )
            for row in rows
        }

    def queued_models(self, batch: str) -> set[Model]:
        """Return the models of a batch's queued rows; reads the first 20,000 of them."""
        some = select(JobRow.model).where(JobRow.batch == batch, QUEUED).limit(_LOOKED_AT).subquery()
        with self._database.read() as connection:
            return set(connection.execute(select(some.c.model).distinct()).scalars())

    @long_lasting
    def running(self) -> dict[Model, int]:
        """Count running jobs by model; reads running jobs only."""
        query = select(JobRow.model, func.count().label("jobs")).where(RUNNING).group_by(JobRow.model)
        with self._database.read() as connection:
            return {row.model: row.jobs for row in connection.execute(query)}

    @long_lasting
    def ended(self) -> dict[tuple[Model, str], EndedJobs]:
        """Count final jobs by (model, state); reads all jobs."""
        query = (
            select(
                JobRow.model,
                JobRow.state,
                func.count(),
                tokens_read(),
                func.coalesce(func.sum(JobRow.completion_tokens), 0),
                func.coalesce(func.sum(JobRow.cached_tokens), 0),
                func.coalesce(func.sum(JobRow.reasoning_tokens), 0),
                func.coalesce(func.sum(JobRow.gpu_seconds), 0.0),
                func.coalesce(func.sum(JobRow.energy_joules), 0.0),
            )
            .where(JobRow.finished_at.is_not(None))
            .group_by(JobRow.model, JobRow.state)
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
            return {
                (model, state): EndedJobs(
                    jobs,
                    int(read or 0),
                    int(written or 0),
                    int(cached or 0),
                    int(thought or 0),
                    seconds or 0.0,
                    joules or 0.0,
                )
                for model, state, jobs, read, written, cached, thought, seconds, joules in found
            }

    @long_lasting
    def workers(self) -> dict[tuple[str, str], int]:
        """Count past and present workers by (model, state)."""
        since = self._database.clock_time(ago=timedelta(seconds=self._database.settings.stale_seconds))
        silent = WorkerRow.state.in_([str(state) for state in LIVE]) & (WorkerRow.heartbeat_at <= since)
        said = case((silent, SILENT), else_=WorkerRow.state).label("said")
        query = select(WorkerRow.model, said, func.count()).group_by(WorkerRow.model, said)
        with self._database.read() as connection:
            return {(model, state): workers for model, state, workers in connection.execute(query)}
