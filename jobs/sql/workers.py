"""Statements about workers: each worker writes its own row, clients read which models are served."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, insert, select, update

from nightmill.jobs.base.contract import JsonObject, WorkerState
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.settling import settle_heartbeats
from nightmill.jobs.sql.tables import WorkerRow

LIVE = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.SLEEPING)
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

    def serving(self, model: str | None = None, *, sleeping: bool = False) -> list[Worker]:
        """Return the live workers that serve `model` (None: any model), or are about to.

        They have recent heartbeats and are not draining. `sleeping`: those too that will serve it again when
        their hours begin, when there are jobs, or when they are resumed.
        """
        settle_heartbeats(self.database)
        states = (*_SERVING, WorkerState.SLEEPING) if sleeping else _SERVING
        of_model = [] if model is None else [WorkerRow.model == model]
        return self._find(self._recent(), WorkerRow.state.in_(states), *of_model)

    def sleeping(self, model: str | None = None) -> list[Worker]:
        """Return the workers that sleep and will serve `model` (None: any model) once they are awake."""
        asleep = self.serving(model, sleeping=True)
        return [worker for worker in asleep if worker.state == WorkerState.SLEEPING]

    def could_serve(self, model: str | None = None) -> list[Worker]:
        """Return the live workers that load several models in turn, this one (None: any) among them."""
        settle_heartbeats(self.database)
        found = self._find(self._recent(), WorkerRow.state.in_(LIVE), WorkerRow.models.is_not(None))
        return [worker for worker in found if model is None or worker.could_serve(model)]

    @retried
    def pause(self, workers: Sequence[str] | None = None, *, paused: bool = True) -> list[Worker]:
        """Pause live workers, or with `paused=False` resume them; returns those that this changed.

        A paused worker finishes what it can in its drain time, frees its GPU and sleeps until it is resumed.
        `workers` are ids or unique beginnings of ids, of a worker or of all that share a GPU (`together`);
        None: all live ones. Raises InvalidRequestError.
        """
        settle_heartbeats(self.database)
        live = self._find(self._recent(), WorkerRow.state.in_(LIVE))
        named = live if workers is None else [one for worker in workers for one in _named(live, worker)]
        wanted = list({worker.id: worker for worker in named}.values())
        with self.database.write() as connection:
            changed = {
                worker.id
                for worker in wanted
                if connection.execute(
                    update(WorkerRow)
                    .where(WorkerRow.id == worker.id, WorkerRow.paused.is_(not paused))
                    .values(paused=paused)
                ).rowcount
            }
        return [worker for worker in wanted if worker.id in changed]

    def _recent(self) -> ColumnElement[bool]:
        """Return the condition for workers with recent heartbeats."""
        stale = timedelta(seconds=self.database.settings.stale_seconds)
        return WorkerRow.heartbeat_at > self.database.clock_time(ago=stale)

    def models(self) -> Sequence[str]:
        """Return the names of all models that were ever served, or are to be in turn, sorted."""
        with self.database.read() as connection:
            names = set(connection.execute(select(WorkerRow.model).distinct()).scalars())
            lists = connection.execute(select(WorkerRow.models).where(WorkerRow.models.is_not(None)))
            for listed in lists.scalars():
                names.update(listed if isinstance(listed, list) else ())
        return sorted(names)

    def _find(self, *conditions: Any) -> list[Worker]:
        query = select(WorkerRow.__table__).where(*conditions).order_by(WorkerRow.started_at.desc())
        with self.database.read() as connection:
            rows = connection.execute(query).mappings()
            return [Worker(**{**row, "state": WorkerState.read(row["state"])}) for row in rows]


def _named(workers: Sequence[Worker], beginning: str) -> list[Worker]:
    """Return the worker whose id begins so, or those that share a GPU under such an id."""
    found = [worker for worker in workers if beginning and worker.id.startswith(beginning)]
    groups = {
        worker.together
        for worker in workers
        if beginning and worker.together is not None and worker.together.startswith(beginning)
    }
    if len(found) == 1 and not groups:
        return found
    if len(groups) == 1 and not found:
        return [worker for worker in workers if worker.together in groups]
    known = ", ".join(worker.id[:8] for worker in workers[:20]) or "none"
    why = "is not the id of a live worker"
    if found or groups:
        why = f"begins the ids of {len(found) + len(groups)} live workers"
    raise InvalidRequestError(f"{beginning[:64]!r} {why}; alive are {known}")


class RegisteredWorker:
    """A worker's own row. `worker_id` is new for every process, but for one that has slept."""

    def __init__(self, database: Database, worker_id: str) -> None:
        self.database = database
        self.worker_id = worker_id
        self.has_slept = False
        """Whether it was asleep when it was registered."""

    @retried
    def register(self, host: str, pid: int, model: str, gpu: str | None, detail: str | None = None) -> None:
        """Insert this worker as starting, or update it if it has slept or is starting already; `detail`
        describes its activity for people."""
        values = {
            "host": host,
            "pid": pid,
            "gpu": gpu,
            "model": model,
            "state": WorkerState.STARTING,
            "detail": detail,
            "started_at": self.database.now(),
            "heartbeat_at": self.database.clock_time(),
        }
        before = (WorkerState.SLEEPING, WorkerState.LOST, WorkerState.STARTING)
        woken = update(WorkerRow).where(WorkerRow.id == self.worker_id, WorkerRow.state.in_(before))
        state = select(WorkerRow.state).where(WorkerRow.id == self.worker_id)
        with self.database.write() as connection:
            self.has_slept |= connection.execute(state).scalar_one_or_none() == WorkerState.SLEEPING
            if not connection.execute(woken.values(**values)).rowcount:
                connection.execute(insert(WorkerRow).values(id=self.worker_id, **values))

    @retried
    def register_models(
        self, models: Sequence[str], *, swap_for_interactive: bool, together: str | None = None
    ) -> None:
        """Record that this registered worker loads these models in turn; `together`: what it and those that
        share its GPU are called."""
        listed = {
            "models": list(models),
            "swap_for_interactive": swap_for_interactive,
            "together": together,
        }
        with self.database.write() as connection:
            connection.execute(update(WorkerRow).where(WorkerRow.id == self.worker_id).values(**listed))

    def paused(self) -> bool:
        """Return True if somebody has paused this worker, and nobody resumed it."""
        with self.database.read() as connection:
            query = select(WorkerRow.paused).where(WorkerRow.id == self.worker_id)
            return bool(connection.execute(query).scalar_one_or_none())

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
        """Delete the row of this worker, which ends before it could claim anything.

        One that has slept signs off: it may have had jobs before, and callers know its models by its row.
        """
        if self.has_slept:
            self.sign_off()
            return
        with self.database.write() as connection:
            connection.execute(delete(WorkerRow).where(WorkerRow.id == self.worker_id))
