"""How a database stands, by model: jobs, the age of queues, workers. For those who watch over it."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import case, func, or_, select

from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import tokens_read
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow, WorkerRow
from nightmill.jobs.sql.workers import LIVE

SILENT = "silent"
"""In place of the state of a worker that should beat and does not, and that nobody has found dead yet."""

Model = str | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The queued jobs of a model whose time has come, or will."""

    jobs: int
    suspects: int  # of these: jobs that were in flight when a worker died
    age: float  # seconds since the oldest could have been claimed; 0 if none can


@dataclass(frozen=True, slots=True)
class Ended:
    """Jobs that have ended."""

    jobs: int
    prompt_tokens: int
    completion_tokens: int


class Standing:
    """Statements that only count."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @long_lasting
    def queued(self) -> dict[Model, Waiting]:
        """The queues; reads queued jobs only."""
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
            row.model: Waiting(
                row.jobs,
                row.suspects,
                0.0 if row.since is None else max(0.0, (now - row.since).total_seconds()),
            )
            for row in rows
        }

    @long_lasting
    def running(self) -> dict[Model, int]:
        """Jobs that run; reads these only."""
        query = select(JobRow.model, func.count().label("jobs")).where(RUNNING).group_by(JobRow.model)
        with self._database.read() as connection:
            return {row.model: row.jobs for row in connection.execute(query)}

    @long_lasting
    def ended(self) -> dict[tuple[Model, str], Ended]:
        """Jobs in final states, by model and state; reads all jobs."""
        query = (
            select(
                JobRow.model,
                JobRow.state,
                func.count(),
                tokens_read(),
                func.coalesce(func.sum(JobRow.completion_tokens), 0),
            )
            .where(JobRow.finished_at.is_not(None))
            .group_by(JobRow.model, JobRow.state)
        )
        with self._database.read() as connection:
            return {
                (model, state): Ended(jobs, int(read or 0), int(written or 0))
                for model, state, jobs, read, written in connection.execute(query)
            }

    @long_lasting
    def workers(self) -> dict[tuple[str, str], int]:
        """Workers that there are and were, by model and state."""
        since = self._database.clock_time(ago=timedelta(seconds=self._database.settings.stale_seconds))
        silent = WorkerRow.state.in_([str(state) for state in LIVE]) & (WorkerRow.heartbeat_at <= since)
        said = case((silent, SILENT), else_=WorkerRow.state).label("said")
        query = select(WorkerRow.model, said, func.count()).group_by(WorkerRow.model, said)
        with self._database.read() as connection:
            return {(model, state): workers for model, state, workers in connection.execute(query)}
