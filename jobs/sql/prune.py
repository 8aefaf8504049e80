"""Deletion of jobs, batches and loads of models that ended long ago. Unfinished ones are never deleted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, or_, select

from nightmill.jobs.sql.activity import ActivityStore
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.deletion import Deletion, delete_jobs
from nightmill.jobs.sql.jobs import FINAL, GROUP, UNFINISHED, chunked
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BatchRow, JobRow, LoadRow


@dataclass(frozen=True, slots=True)
class Pruned:
    """Numbers of deleted jobs and batches, or of those that would be."""

    jobs: int
    batches: int


class Prune:
    """Deletion of everything that ended before `cutoff`.

    A submitted batch is kept or deleted as a whole, by its last row, so its results stay complete. Jobs
    without a batch, and those of batches filled by `enqueue`, are deleted one by one.
    """

    def __init__(self, store: BatchStore, cutoff: datetime) -> None:
        self._store = store
        self._database = store.database
        self._deletion = Deletion(store.database)
        self._cutoff = cutoff

    def carry_out(self, *, dry_run: bool, on_jobs: Callable[[int], None]) -> Pruned:
        """Delete all of it, or with `dry_run` only count; see `Client.prune`."""
        if dry_run:
            return self.count()
        done = Pruned(0, 0)
        for done in self.run():
            on_jobs(done.jobs)
        return done

    @long_lasting
    def count(self) -> Pruned:
        """Count what `run` would delete now."""
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
        """Delete in groups, a transaction each; yields the totals so far.

        Jobs that changed meanwhile are skipped; concurrent runs share the work.
        """
        jobs = batches = 0
        for name in self._whole_batches():
            over = not self._deletion.begin(name, ended_before=self._cutoff)
            while not over:
                gone, over = self._deletion.group(name)
                jobs, batches = jobs + gone, batches + over
                yield Pruned(jobs, batches)
        last: str | None = ""
        while last is not None:
            gone, last = self._delete_single_jobs(last)
            jobs += gone
            yield Pruned(jobs, batches)
        ActivityStore(self._database).prune(self._cutoff)
        self._delete_loads()
        yield Pruned(jobs, batches + self._delete_empty_batches())

    @long_lasting
    @retried
    def _delete_single_jobs(self, last: str) -> tuple[int, str | None]:
        """Delete a group of jobs after the id `last`; returns (number, start of the next group)."""
        with self._database.write() as connection:
            query = select(JobRow.id).where(JobRow.id > last, *self._single_jobs())
            locked = query.order_by(JobRow.id).limit(GROUP).with_for_update(skip_locked=True)
            ids = connection.execute(locked).scalars().all()
            return delete_jobs(connection, ids), ids[-1] if len(ids) == GROUP else None

    @long_lasting
    @retried
    def _delete_empty_batches(self) -> int:
        with self._database.write() as connection:
            query = select(BatchRow.name).where(*self._empty_batches()).order_by(BatchRow.name)
            names = connection.execute(query.with_for_update(skip_locked=True)).scalars().all()
            gone = 0
            for chunk in chunked(names):  # a new statement, which sees rows added before the lock was taken
                empty = (BatchRow.name.in_(chunk), *self._empty_batches())
                gone += connection.execute(delete(BatchRow).where(*empty)).rowcount
            return gone

    @retried
    def _delete_loads(self) -> None:
        """Delete the loads of models that ended before the cutoff."""
        with self._database.write() as connection:
            connection.execute(delete(LoadRow).where(LoadRow.ended_at < self._cutoff))

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

    @long_lasting
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
