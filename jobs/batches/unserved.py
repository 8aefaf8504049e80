"""The workers of a batch: models that no live worker serves, and the hours of those that do."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.hours import end_within
from nightmill.jobs.reply.batch_status import BatchRecord, BatchStatus, Pace, RowCount
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.queue_stats import QueueStats
from nightmill.jobs.sql.workers import WorkerStore


def workers_of(store: BatchStore) -> list[Worker]:
    """Return the live workers, those that sleep among them."""
    return WorkerStore(store.database).serving(sleeping=True)


def within_hours(status: BatchStatus, workers: Sequence[Worker], now: datetime) -> BatchStatus:
    """Return a status whose estimated end counts the hours of the workers that serve its model.

    A batch goes on while one of them is awake, at the speed that it has now.
    """
    model = status.model
    serving = [
        worker for worker in workers if model in (None, worker.model) or worker.could_serve(str(model))
    ]
    if serving and all(worker.wakes_at(now) is not None for worker in serving):
        openings = [moment for worker in serving if (moment := worker.wakes_at(now)) is not None]
        status = replace(status, wakes_at=min(openings))
    hours = [worker.hours for worker in serving if worker.hours is not None and not worker.paused]
    awake = [worker for worker in serving if not worker.paused]
    if status.estimated_end is None or not hours or len(hours) < len(awake):
        return status
    left = (status.estimated_end - now).total_seconds()
    return replace(status, estimated_end=end_within(hours, now, left))


def served_models(store: BatchStore) -> frozenset[str]:
    """Return the names of models that live workers serve, or will once they are awake."""
    in_turn = {
        str(model) for worker in WorkerStore(store.database).could_serve() for model in worker.models or ()
    }
    return frozenset(worker.model for worker in workers_of(store)) | in_turn


def unserved_models(
    store: BatchStore, record: BatchRecord, counts: Sequence[RowCount], served: Collection[str]
) -> list[str | None]:
    """Return the unserved models that queued rows of a batch wait for, sorted.

    None stands for any model, if no worker is alive at all. If the rows name models themselves, only the
    first 20,000 queued rows are checked.
    """
    if not any(count.state is JobState.QUEUED and count.rows for count in counts):
        return []
    if record.scheduled_at is not None and record.scheduled_at > store.database.now():
        return []  # workers may start by then
    wanted = (
        [record.model] if record.model is not None else QueueStats(store.database).queued_models(record.name)
    )
    return sorted((model for model in wanted if not takes(served, model)), key=lambda model: model or "")


def takes(served: Collection[str], model: str | None) -> bool:
    """Return True if a worker that serves one of these models takes rows for `model`; None: rows for any
    model."""
    return bool(served) if model is None else model in served


def stalled(pace: Pace | None) -> bool:
    """Return True if no row has ended recently, so that checking for unserved models is worthwhile."""
    return pace is None or not pace.rows
