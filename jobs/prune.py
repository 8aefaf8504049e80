"""Deleting what is old: finished jobs, and batches whose last row ended long ago. Never unfinished ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, or_, select

from jobs.batch_store import BatchStore, delete_jobs
from jobs.store import FINAL, GROUP, UNFINISHED
from jobs.tables import BatchRow, JobRow


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be."""

    jobs: int
    batches: int


class Prune:
    """What ended before `cutoff`.

    A submitted batch is kept or deleted as a whole, by its last row: its results stay complete. Jobs of no
    batch, and of batches that `enqueue` may add to for ever, are judged one by one.
    """

    def __init__(self, store: BatchStore, cutoff: datetime) -> None:
        self._store = store
        self._database = store.database
        self._cutoff = cutoff

    def count(self) -> Pruned:
        """What `run` would delete now."""
        whole = self._whole_batches()
        with self._database.read() as connection:
            single = connection.execute(
                select(func.count()).select_from(JobRow).where(*self._single_jobs())
            ).scalar_one()
            empty = connection.execute(
                select(func.count()).select_from(BatchRow).where(*self._empty_batches())
            ).scalar_one()
        rows = sum(count.rows for name in whole for count in self._store.counts(name))
        return Pruned(single + rows, empty + len(whole))

    def run(self) -> Iterator[Pruned]:
        """Delete in groups, a transaction each; yields what is gone so far."""
        jobs = batches = 0
        for name in self._whole_batches():
            gone = 0
            for gone in self._store.delete(name):
                yield Pruned(jobs + gone, batches)
            jobs, batches = jobs + gone, batches + 1
        last: str | None = ""
        while last is not None:
            with self._database.write() as connection:
                query = select(JobRow.id).where(JobRow.id > last, *self._single_jobs())
                ids = connection.execute(query.order_by(JobRow.id).limit(GROUP)).scalars().all()
                jobs += delete_jobs(connection, ids)
            last = ids[-1] if len(ids) == GROUP else None
            yield Pruned(jobs, batches)
        with self._database.write() as connection:
            batches += connection.execute(delete(BatchRow).where(*self._empty_batches())).rowcount
        yield Pruned(jobs, batches)

    def _single_jobs(self) -> tuple[ColumnElement[bool], ...]:
        open_batches = select(BatchRow.name).where(BatchRow.format.is_(None))
        return (
            JobRow.finished_at < self._cutoff,
            JobRow.state.in_(FINAL),
            or_(JobRow.batch.is_(None), JobRow.batch.in_(open_batches)),
        )

    def _empty_batches(self) -> tuple[Any, ...]:
        return (
            BatchRow.format.is_(None),
            BatchRow.created_at < self._cutoff,
            ~exists().where(JobRow.batch == BatchRow.name),
        )

    def _whole_batches(self) -> list[str]:
        of_batch = JobRow.batch == BatchRow.name
        query = select(BatchRow.name).where(
            BatchRow.format.is_not(None),
            BatchRow.created_at < self._cutoff,
            ~exists().where(of_batch, JobRow.state.in_(UNFINISHED)),
            ~exists().where(of_batch, JobRow.finished_at >= self._cutoff),
        )
        with self._database.read() as connection:
            return list(connection.execute(query.order_by(BatchRow.created_at)).scalars())
