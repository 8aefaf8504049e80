"""Who generates: the rows of workers, and whether a model is served."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import select

from nightmill.jobs.contract import Worker, WorkerState
from nightmill.jobs.sql.database import Database
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
        since = self.database.now() - timedelta(seconds=self.database.settings.stale_seconds)
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
