"""Who generates: the rows of workers, each written by its worker alone, and whether a model is served."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, insert, select, update

from nightmill.jobs.contract import JsonObject, WorkerState
from nightmill.jobs.job import Worker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.settling import settle_heartbeats
from nightmill.jobs.sql.tables import WorkerRow

LIVE = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)
_SERVING = (WorkerState.STARTING, WorkerState.READY)


class WorkerStore:
    """Workers in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def all(self) -> list[Worker]:
        """Every worker that was ever registered, newest first."""
        return self._find()

    def get(self, worker_id: str) -> Worker | None:
        """One worker; None if it has not registered, or never came to serve."""
        return next(iter(self._find(WorkerRow.id == worker_id)), None)

    def serving(self, model: str | None = None) -> list[Worker]:
        """Those that take jobs for `model` (None: any model), or are about to.

        They beat, and do not drain.
        """
        settle_heartbeats(self.database)
        since = self.database.clock_time(ago=timedelta(seconds=self.database.settings.stale_seconds))
        of_model = [] if model is None else [WorkerRow.model == model]
        return self._find(WorkerRow.heartbeat_at > since, WorkerRow.state.in_(_SERVING), *of_model)

    def models(self) -> Sequence[str]:
        """Names of the models that were ever served, in order."""
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
        """Enter this worker, as starting; `detail` says what it is doing, for people."""
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
        """Say that this worker lives, and what it does; False if it was given up and its jobs taken."""
        said = {"heartbeat_at": self.database.clock_time(), "state": state, "detail": detail, "stats": stats}
        with self.database.write() as connection:
            done = connection.execute(
                update(WorkerRow)
                .where(WorkerRow.id == self.worker_id, WorkerRow.state.in_(LIVE))
                .values(**said)
            )
            if not done.rowcount:  # declared lost while it was only slow: it may come back, with new claims
                connection.execute(
                    update(WorkerRow)
                    .where(WorkerRow.id == self.worker_id, WorkerRow.state == WorkerState.LOST)
                    .values(**said)
                )
        return bool(done.rowcount)

    @retried
    def sign_off(self) -> None:
        """This worker has ended in order and holds no job."""
        with self.database.write() as connection:
            connection.execute(
                update(WorkerRow)
                .where(WorkerRow.id == self.worker_id)
                .values(state=WorkerState.STOPPED, heartbeat_at=self.database.clock_time())
            )

    @retried
    def withdraw(self) -> None:
        """This worker ends before it could claim anything: as if it had never been."""
        with self.database.write() as connection:
            connection.execute(delete(WorkerRow).where(WorkerRow.id == self.worker_id))
