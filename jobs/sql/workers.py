"""Statements about workers: each worker writes its own row, clients read which models are served."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, insert, select, update

from nightmill.jobs.base.contract import JsonObject, WorkerState
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.settling import settle_heartbeats
from nightmill.jobs.sql.tables import WorkerRow

LIVE = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)
_SERVING = (WorkerState.STARTING, WorkerState.READY)


class WorkerStore:
    """The workers in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def all(self) -> list[Worker]:
        """Return all registered workers, newest first."""
        return self._find()

    def get(self, worker_id: str) -> Worker | None:
        """Return a worker; None if it has not registered, or never served."""
        return next(iter(self._find(WorkerRow.id == worker_id)), None)

    def serving(self, model: str | None = None) -> list[Worker]:
        """Return the live workers that serve `model` (None: any model), or are about to.

        They have recent heartbeats and are not draining.
        """
        settle_heartbeats(self.database)
        since = self.database.clock_time(ago=timedelta(seconds=self.database.settings.stale_seconds))
        of_model = [] if model is None else [WorkerRow.model == model]
        return self._find(WorkerRow.heartbeat_at > since, WorkerRow.state.in_(_SERVING), *of_model)

    def models(self) -> Sequence[str]:
        """Return the names of all models ever served, sorted."""
        with self.database.read() as connection:
            return (
                connection.execute(select(WorkerRow.model).distinct().order_by(WorkerRow.model))
                .scalars()
                .all()
            )

    def _find(self, *conditions: Any) -> list[Worker]:
        query = select(WorkerRow.__table__).where(*conditions).order_by(WorkerRow.started_at.desc())
        with self.database.read() as connection:
            rows = connection.execute(query).mappings()
            return [Worker(**{**row, "state": WorkerState.read(row["state"])}) for row in rows]


class RegisteredWorker:
    """A worker's own row. `worker_id` is new for every process."""

    def __init__(self, database: Database, worker_id: str) -> None:
        self.database = database
        self.worker_id = worker_id

    @retried
    def register(self, host: str, pid: int, model: str, gpu: str | None, detail: str | None = None) -> None:
        """Insert this worker as starting; `detail` describes its activity for people."""
        now = self.database.now()
        with self.database.write() as connection:
            connection.execute(
                insert(WorkerRow).values(
                    id=self.worker_id,
                    host=host,
                    pid=pid,
                    gpu=gpu,
                    model=model,
                    state=WorkerState.STARTING,
                    detail=detail,
                    started_at=now,
                    heartbeat_at=self.database.clock_time(),
                )
            )

    @retried
    def beat(self, state: WorkerState, detail: str | None = None, stats: JsonObject | None = None) -> bool:
        """Write a heartbeat with state and activity; returns False if this worker was declared dead and lost
        its jobs."""
        said = {"heartbeat_at": self.database.clock_time(), "state": state, "detail": detail, "stats": stats}
        with self.database.write() as connection:
            done = connection.execute(
                update(WorkerRow)
                .where(WorkerRow.id == self.worker_id, WorkerRow.state.in_(LIVE))
                .values(**said)
            )
            if not done.rowcount:  # declared lost while only slow: it may return with new claims
                connection.execute(
                    update(WorkerRow)
                    .where(WorkerRow.id == self.worker_id, WorkerRow.state == WorkerState.LOST)
                    .values(**said)
                )
        return bool(done.rowcount)

    @retried
    def sign_off(self) -> None:
        """Record that this worker has ended in order and holds no job."""
        with self.database.write() as connection:
            connection.execute(
                update(WorkerRow)
                .where(WorkerRow.id == self.worker_id)
                .values(state=WorkerState.STOPPED, heartbeat_at=self.database.clock_time())
            )

    @retried
    def withdraw(self) -> None:
        """Delete the row of this worker, which ends before it could claim anything."""
        with self.database.write() as connection:
            connection.execute(delete(WorkerRow).where(WorkerRow.id == self.worker_id))
