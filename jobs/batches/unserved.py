"""Detection of models that rows wait for and no live worker serves."""

from collections.abc import Collection, Sequence

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.reply.batch_status import BatchRecord, Pace, RowCount
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.queue_stats import QueueStats
from nightmill.jobs.sql.workers import WorkerStore


def served_models(store: BatchStore) -> frozenset[str]:
    """Return the names of models that live workers serve, or will once they are awake."""
    workers = WorkerStore(store.database)
    in_turn = {str(model) for worker in workers.could_serve() for model in worker.models or ()}
    return frozenset(worker.model for worker in workers.serving(sleeping=True)) | in_turn


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
