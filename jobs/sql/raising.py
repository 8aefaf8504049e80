"""Other limits for a batch, after which the rows that a limit ended are queued again if they may be."""

from collections.abc import Iterator, Mapping
from datetime import datetime

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.limits import Limits
from nightmill.jobs.sql import limits as counters
from nightmill.jobs.sql.batch_reading import no_batch
from nightmill.jobs.sql.batches import UNSUCCESSFUL, BatchStore
from nightmill.jobs.sql.jobs import RETRYABLE, by_queue, retried_values
from nightmill.jobs.sql.locks import hold_batches, lock_jobs, refuse_deleting
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import RUNNING, JobRow

Groups = Mapping[tuple[str | None, int], list[str]]
"""Ids of queued jobs by (model, priority)."""


class Raising:
    """Changes the limits of batches."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._database = store.database

    def change(self, name: str, limits: Limits, deadline: datetime | None) -> Iterator[Groups]:
        """Write these limits; yields groups of rows that are queued again, to be announced.

        deadline  of those rows; None: that of the batch, if it is still to come

        Raises BatchNotFoundError, and BatchConflictError if the batch is being deleted.
        """
        self._write(name, limits)
        if not self._recount(name):
            return
        now = self._database.now()
        if deadline is None:
            kept = self._store.get(name).deadline_at
            deadline = kept if kept is not None and kept > now else None
        stopped = (*RETRYABLE, JobRow.stop_reason == StopReason.BUDGET)
        for ids in self._store.pages_of_ids(name, UNSUCCESSFUL):
            values = retried_values(self._database.now(), deadline)
            if changed := self._store.change_rows(ids, stopped, values, batch=name):
                yield by_queue(row._mapping for row in changed)

    @retried
    def _write(self, name: str, limits: Limits) -> None:
        with self._database.write() as connection:
            locked = hold_batches(connection, [name])
            if not locked:
                raise no_batch(connection, name)
            refuse_deleting(locked[name])
            counters.change(connection, name, limits)

    @long_lasting
    @retried
    def _recount(self, name: str) -> bool:
        with self._database.write() as connection:
            lock_jobs(connection, JobRow.batch == name, RUNNING)
            return counters.recount(connection, name, self._database.now())
