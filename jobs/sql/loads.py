"""Statements about models that are loaded in turn: what waits for each, and which are or cannot be loaded.

Each load has a row in `loads`, from its choice to its end. A choice is made in a transaction that locks the
rows of the workers that choose, so that two never take the last rows of a model both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import Connection, and_, case, func, insert, or_, select, update

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql import followers
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import GROUP, chunked
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.suspects import claimable, of_models
from nightmill.jobs.sql.tables import QUEUED, JobRow, LoadRow, WorkerRow
from nightmill.jobs.sql.workers import LIVE

_IDS = IdSource()
_SLOTS = 64  # rows that a worker computes at once, while it has not said how many
_BATCH_PRIORITY = 5  # of interactive rows, where these are no reason to load a model: the usual one
_OPEN = LoadRow.ended_at.is_(None)


class FailureKind(StrEnum):
    """The part that is to blame for a failed load."""

    FILE = "file"  # the model's file: no other worker would load it
    FETCH = "fetch"  # the network, or the name of the model
    RUNNER = "runner"  # the arithmetic, its memory or its device


@dataclass(frozen=True, slots=True)
class Queue:
    """The queued rows of a model that could be claimed now."""

    model: str | None  # None: rows that any model may answer
    rows: int
    priority: int  # of the most urgent row that nobody waits for
    since: datetime  # when the first of them could be claimed
    deadline: datetime | None = None  # the earliest of those that nobody waits for
    interactive: int = 0  # rows that somebody waits for


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed loads of a model by a worker since it last loaded it."""

    count: int
    last: datetime
    error: str
    kind: FailureKind | None  # of the last one; None: of a kind that a later version knows


class Loads:
    """One worker's view on models that are loaded in turn."""

    def __init__(self, database: Database, worker_id: str) -> None:
        self.database = database
        self.worker_id = worker_id

    @long_lasting
    def queues(self, models: Sequence[str | None]) -> dict[str | None, Queue]:
        """Return the queues of these models that have rows; reads their queued rows."""
        now = self.database.now()
        awaited = JobRow.priority >= INTERACTIVE
        query = (
            select(
                JobRow.model,
                func.count(),
                func.max(case((awaited, _BATCH_PRIORITY), else_=JobRow.priority)),
                func.min(func.coalesce(JobRow.scheduled_at, JobRow.created_at)),
                func.min(case((~awaited, JobRow.deadline_at))),
                func.sum(case((awaited, 1), else_=0)),
            )
            .where(of_models(models), *claimable(now))
            .group_by(JobRow.model)
        )
        with self.database.read() as connection:
            return {
                model: Queue(model, rows, priority, since, deadline, int(interactive))
                for model, rows, priority, since, deadline, interactive in connection.execute(query)
            }

    @retried
    def begin(self, choose: Callable[[Mapping[str, int]], tuple[str, str] | None]) -> str | None:
        """Let `choose` take a model and write that down; returns the model, or None if it takes none.

        choose  is given, by model, the rows that other live workers which have it loaded, or are loading it,
                compute at once; returns (model, reason). It is called under a lock, so it must not wait
        """
        with self.database.write() as connection:
            turns = select(WorkerRow.id).where(WorkerRow.models.is_not(None), WorkerRow.state.in_(LIVE))
            connection.execute(turns.order_by(WorkerRow.id).with_for_update()).all()
            chosen = choose(self._held_by_others(connection))
            if chosen is None:
                return None
            model, reason = chosen
            now = self.database.now()
            self._end(connection, now)
            connection.execute(
                insert(LoadRow).values(
                    id=_IDS.draw(), worker=self.worker_id, model=model, reason=reason, began_at=now
                )
            )
            connection.execute(update(WorkerRow).where(WorkerRow.id == self.worker_id).values(model=model))
        return model

    def is_open(self) -> bool:
        """Return True if this worker has chosen a model, and its load has not ended."""
        query = select(LoadRow.id).where(LoadRow.worker == self.worker_id, _OPEN).limit(1)
        with self.database.read() as connection:
            return connection.execute(query).one_or_none() is not None

    def held_by_others(self) -> dict[str, int]:
        """Return what `begin` gives to `choose`, without a lock."""
        with self.database.read() as connection:
            return self._held_by_others(connection)

    def _held_by_others(self, connection: Connection) -> dict[str, int]:
        stale = timedelta(seconds=self.database.settings.stale_seconds)
        has_chosen = select(LoadRow.id).where(LoadRow.worker == WorkerRow.id, _OPEN).exists()
        serving = WorkerRow.state.in_((WorkerState.STARTING, WorkerState.READY))
        about_to = and_(WorkerRow.state == WorkerState.SLEEPING, has_chosen)
        query = select(WorkerRow.model, WorkerRow.stats).where(
            WorkerRow.id != self.worker_id,
            WorkerRow.heartbeat_at > self.database.clock_time(ago=stale),
            serving | about_to,
        )
        held: dict[str, int] = {}
        for model, stats in connection.execute(query):
            slots = stats.get("sequences") if isinstance(stats, dict) else None
            held[model] = held.get(model, 0) + (slots if type(slots) is int and slots > 0 else _SLOTS)
        return held

    @retried
    def ready(self) -> None:
        """Record that the model that this worker chose is loaded."""
        with self.database.write() as connection:
            connection.execute(
                update(LoadRow)
                .where(LoadRow.worker == self.worker_id, _OPEN)
                .values(ready_at=self.database.now())
            )

    @retried
    def end(self, error: str | None = None, kind: FailureKind | None = None) -> None:
        """Record that the model is not loaded any more; `error`: why it could not be, and of what kind."""
        with self.database.write() as connection:
            self._end(connection, self.database.now(), error=error, failure=kind)

    def _end(self, connection: Connection, now: datetime, **said: str | None) -> None:
        ended = update(LoadRow).where(LoadRow.worker == self.worker_id, _OPEN)
        connection.execute(ended.values(ended_at=now, **said))

    def beside(self) -> list[str]:
        """Return the models of the workers that share this one's GPU, and that take jobs now."""
        stale = timedelta(seconds=self.database.settings.stale_seconds)
        own = select(WorkerRow.together).where(WorkerRow.id == self.worker_id).scalar_subquery()
        query = select(WorkerRow.model).where(
            WorkerRow.together == own,
            WorkerRow.id != self.worker_id,
            WorkerRow.state == WorkerState.READY,
            WorkerRow.heartbeat_at > self.database.clock_time(ago=stale),
        )
        with self.database.read() as connection:
            return sorted(connection.execute(query.distinct()).scalars())

    def most_urgent(self, models: Sequence[str | None]) -> int | None:
        """Return the priority of the most urgent row that waits for these models, and that nobody waits for;
        None if none does. Rows without a message are not seen: of the most urgent ones, some have theirs."""
        now = self.database.now()
        found: list[int] = []
        with self.database.read() as connection:
            for model in models:  # one after another, each by its index
                query = select(JobRow.priority).where(
                    of_models([model]),
                    JobRow.sent_at.is_not(None),
                    JobRow.priority < INTERACTIVE,
                    *claimable(now),
                )
                found += connection.execute(query.order_by(JobRow.priority.desc()).limit(1)).scalars()
        return max(found, default=None)

    def seconds(self, models: Sequence[str]) -> dict[str, float]:
        """Return how long the last load of each of these models took, where there was one."""
        found: dict[str, float] = {}
        with self.database.read() as connection:
            for model in models:
                last = (
                    select(LoadRow.began_at, LoadRow.ready_at)
                    .where(LoadRow.model == model, LoadRow.ready_at.is_not(None))
                    .order_by(LoadRow.id.desc())
                    .limit(1)
                )
                if (row := connection.execute(last).one_or_none()) is not None:
                    found[model] = max(0.0, (row.ready_at - row.began_at).total_seconds())
        return found

    def failures(self, models: Sequence[str]) -> dict[str, Failures]:
        """Return the failed loads of these models by this worker that no row was charged with."""
        with self.database.read() as connection:
            return _failures(connection, self.worker_id, models)

    def has_loaded_any(self) -> bool:
        """Return True if this worker, or one that shares its GPU, has loaded a model: so it is not the GPU
        that fails."""
        own_group = select(WorkerRow.together).where(WorkerRow.id == self.worker_id).scalar_subquery()
        beside = select(WorkerRow.id).where(WorkerRow.together == own_group)
        ours = or_(LoadRow.worker == self.worker_id, LoadRow.worker.in_(beside))
        loaded = select(LoadRow.id).where(ours, LoadRow.ready_at.is_not(None))
        with self.database.read() as connection:
            return connection.execute(loaded.limit(1)).one_or_none() is not None

    def others_hope(self, model: str, attempts: int) -> bool:
        """Return True if another live worker serves the model, or loads it in turn and has not failed to
        for `attempts` times."""
        stale = timedelta(seconds=self.database.settings.stale_seconds)
        query = select(WorkerRow.id, WorkerRow.model, WorkerRow.models).where(
            WorkerRow.id != self.worker_id,
            WorkerRow.state.in_(LIVE),
            WorkerRow.heartbeat_at > self.database.clock_time(ago=stale),
        )
        with self.database.read() as connection:
            for row in connection.execute(query).all():
                if row.models is None and row.model == model:
                    return True
                if model in (row.models or ()):
                    failed = _failures(connection, row.id, [model]).get(model)
                    if failed is None or failed.count < attempts:
                        return True
        return False

    def least_attempts(self, model: str) -> int | None:
        """Return the fewest attempts that a queued row of the model has; None if it has no rows."""
        least = select(func.min(JobRow.max_attempts)).where(
            JobRow.model == model, *claimable(self.database.now())
        )
        with self.database.read() as connection:
            return connection.execute(least).scalar_one_or_none()

    def fail_rows(self, model: str, failures: Failures) -> int:
        """Fail the queued rows of a model that have no more attempts than it failed to load; returns their
        number.

        If that leaves none, later rows find the failures settled, and have attempts of their own.
        """
        failed = 0
        while (group := self._fail_group(model, failures)) > 0:
            failed += group
        if self.least_attempts(model) is None:
            self._settle(model)
        return failed

    @retried
    def _fail_group(self, model: str, failures: Failures) -> int:
        now = self.database.now()
        reason = (
            f"the model {model!r} could not be loaded, {failures.count} times; the last: {failures.error}"
        )
        failed = 0
        with self.database.write() as connection:
            found = connection.execute(
                select(JobRow.id)
                .where(JobRow.model == model, JobRow.max_attempts <= failures.count, *claimable(now))
                .order_by(JobRow.id)
                .limit(GROUP)
                .with_for_update(skip_locked=True)
            )
            for chunk in chunked(found.scalars().all()):
                failed += connection.execute(
                    update(JobRow)
                    .where(JobRow.id.in_(chunk), QUEUED)
                    .values(
                        state=JobState.FAILED,
                        stop_reason=StopReason.ERROR,
                        error=reason,
                        finished_at=now,
                    )
                ).rowcount
                followers.ended(connection, chunk, now)
        return failed

    @retried
    def _settle(self, model: str) -> None:
        with self.database.write() as connection:
            failed = update(LoadRow).where(LoadRow.model == model, LoadRow.error.is_not(None))
            connection.execute(failed.values(settled=True))


def _failures(connection: Connection, worker_id: str, models: Collection[str]) -> dict[str, Failures]:
    """Return the unsettled failures of a worker, by model, since it last loaded each."""
    rows = connection.execute(
        select(LoadRow.model, LoadRow.ready_at, LoadRow.ended_at, LoadRow.error, LoadRow.failure)
        .where(LoadRow.worker == worker_id, LoadRow.model.in_(models), LoadRow.settled.is_(False))
        .order_by(LoadRow.id.desc())
    ).all()
    found: dict[str, Failures] = {}
    loaded: set[str] = set()
    for row in rows:
        if row.ready_at is not None:
            loaded.add(row.model)
        elif row.error is not None and row.model not in loaded:
            before = found.get(row.model)
            found[row.model] = (
                Failures(1, row.ended_at, row.error, _kind(row.failure))
                if before is None
                else replace(before, count=before.count + 1)
            )
    return found


def _kind(text: str | None) -> FailureKind | None:
    return FailureKind(text) if text in list(FailureKind) else None
