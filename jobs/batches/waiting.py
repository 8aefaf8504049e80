"""Waiting for jobs, and reading results as they finish, by polling the table.

Waiting is a generator of steps: a step is a job, or a number of seconds to pause before the next one. The
caller sleeps as it needs: with `time.sleep` here, with `asyncio.sleep` in `jobs.aio`.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Literal

from nightmill.jobs.base.ids import JobIds
from nightmill.jobs.errors import (
    DatabaseUnreachableError,
    InvalidParameterError,
    JobNotFoundError,
    WaitTimeoutError,
)
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.batch_reading import batch_in
from nightmill.jobs.sql.jobs import CHUNK, Selection, Store, chunked
from nightmill.jobs.sql.patience import until

Order = Literal["enqueued", "finished"]

_FIRST_POLL = 0.02
_SLOWEST_POLL = 0.5
# A transaction that stamped its rows may become visible this much later than one stamped after it.
_COMMIT_LAG = timedelta(seconds=30)


class JobWaiter:
    """Polls a store; `Client.wait` and `Client.results` describe the arguments."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def wait(self, jobs: str | Iterable[str] | None, batch: str | None, timeout: float | None) -> None:
        """Return once all jobs are final; raises WaitTimeoutError, JobNotFoundError, BatchNotFoundError."""
        for pause in self.steps_to_end(jobs, batch, timeout):
            time.sleep(pause)

    def results(
        self, jobs: Iterable[str] | None, batch: str | None, order: Order, wait: bool, timeout: float | None
    ) -> Iterator[Job]:
        """Yield final jobs; raises WaitTimeoutError, JobNotFoundError, BatchNotFoundError."""
        return _slept(self.steps_to_results(jobs, batch, order, wait, timeout))

    def steps_to_end(
        self, jobs: str | Iterable[str] | None, batch: str | None, timeout: float | None
    ) -> Iterator[float]:
        """Yield the pauses of `wait`."""
        give_up_at = _deadline(timeout)
        for selection in self._selections(jobs, batch, give_up_at):
            yield from self._wait_for(selection, give_up_at)

    def steps_to_results(
        self, jobs: Iterable[str] | None, batch: str | None, order: Order, wait: bool, timeout: float | None
    ) -> Iterator[Job | float]:
        """Yield the jobs and pauses of `results`."""
        if order not in ("enqueued", "finished"):
            raise InvalidParameterError(
                f"order: must be 'enqueued' or 'finished' (got {order!r})", field="order"
            )
        ids = None if jobs is None else _id_list(jobs)
        if order == "finished":
            return self._as_they_finish(ids, batch, wait, _deadline(timeout))
        return self._as_enqueued(ids, batch, wait, _deadline(timeout))

    def _selections(
        self, jobs: str | Iterable[str] | None, batch: str | None, give_up_at: float | None
    ) -> Iterator[Selection]:
        if (jobs is None) == (batch is None):
            raise InvalidParameterError("name either jobs or a batch", field="jobs")
        if jobs is None:
            self._check_batch(str(batch), give_up_at)
            yield Selection(batch=batch)
            return
        for chunk in chunked(_id_list(jobs)):
            with in_time(give_up_at):
                missing = self._store.missing(chunk)
            if missing:
                raise JobNotFoundError(f"there is no job {missing[0]!r}")
            yield Selection(ids=chunk)

    def _check_batch(self, batch: str, give_up_at: float | None) -> None:
        """Raise BatchNotFoundError for a batch that is not there: it would be taken for one without jobs."""
        with in_time(give_up_at), self._store.database.read() as connection:
            batch_in(connection, batch)

    def _wait_for(self, selection: Selection, give_up_at: float | None) -> Iterator[float]:
        pause = _FIRST_POLL
        while True:
            with in_time(give_up_at):
                left = self._store.count_unfinished(selection)
            if left == 0:
                return
            pause = yield from self._pause(pause, give_up_at, left)

    @staticmethod
    def _pause(pause: float, give_up_at: float | None, left: int) -> Generator[float, None, float]:
        """Yield one pause; returns the length of the next one."""
        if give_up_at is not None:
            remaining = give_up_at - time.monotonic()
            if remaining <= 0:
                said = "1 job is not finished in the time given; it goes on"
                if left > 1:
                    said = f"{left:,} jobs are not finished in the time given; they go on"
                raise WaitTimeoutError(said)
            pause = min(pause, remaining)
        yield pause
        return min(max(pause, _FIRST_POLL) * 1.5, _SLOWEST_POLL)

    def _as_enqueued(
        self, ids: Sequence[str] | None, batch: str | None, wait: bool, give_up_at: float | None
    ) -> Iterator[Job | float]:
        for selection in self._pages(ids, batch, give_up_at):
            if wait:
                yield from self._wait_for(selection, give_up_at)
            with in_time(give_up_at):
                found = {job.id: job for job in self._store.find(selection)}
            for job_id in selection.ids or ():
                job = found.get(job_id)
                if job is not None and job.state.final:
                    yield job

    def _pages(
        self, ids: Sequence[str] | None, batch: str | None, give_up_at: float | None
    ) -> Iterator[Selection]:
        """Yield selections of at most CHUNK ids in order; a growing batch is followed."""
        if ids is not None:
            yield from self._selections(ids, None, give_up_at)
            return
        if batch is None:
            raise InvalidParameterError("name either jobs or a batch", field="jobs")
        self._check_batch(batch, give_up_at)
        for page in self._pages_of_batch(batch, give_up_at):
            yield Selection(ids=page)

    def _pages_of_batch(self, batch: str, give_up_at: float | None) -> Iterator[list[str]]:
        """Yield the ids of a batch in order, then late ones with smaller ids.

        A job gets its id when it is enqueued but becomes visible at the commit, which with `session=` may be
        after jobs with larger ids were read. So at the end the jobs are counted, and if there are more than
        were read, the missing ones are searched. This takes 16 bytes a job.
        """
        seen = JobIds()
        while True:
            read = JobIds()
            known = iter(seen)
            next_known = next(known, "")
            last: str | None = None
            while page := self._page(batch, last, give_up_at):
                last = page[-1]
                read.extend(page)
                new: list[str] = []
                for job_id in page:  # both are sorted, so one pass suffices
                    while next_known and next_known < job_id:
                        next_known = next(known, "")
                    if job_id != next_known:
                        new.append(job_id)
                if new:
                    yield new
            seen = read
            with in_time(give_up_at):
                if self._store.count(Selection(batch=batch)) <= len(seen):
                    return

    def _page(self, batch: str, last: str | None, give_up_at: float | None) -> list[str]:
        with in_time(give_up_at):
            return list(self._store.ids(Selection(batch=batch, after_id=last), CHUNK))

    def _as_they_finish(
        self, ids: Sequence[str] | None, batch: str | None, wait: bool, give_up_at: float | None
    ) -> Iterator[Job | float]:
        selections = list(self._selections(ids, batch, give_up_at))
        seen: set[str] = set()
        pause = _FIRST_POLL
        since: tuple[datetime, str] | None = None
        while True:
            # Counted before reading: if nothing was left then, the reading misses nothing.
            with in_time(give_up_at):
                left = sum(self._store.count_unfinished(selection) for selection in selections)
            for selection in selections:
                for job in self._newly_finished(selection, None if left == 0 else since, give_up_at):
                    if job.id not in seen:
                        seen.add(job.id)
                        pause = _FIRST_POLL
                        yield job
            if left == 0 or not wait:
                return
            with in_time(give_up_at):
                since = (self._store.database.now() - _COMMIT_LAG, "")
            pause = yield from self._pause(pause, give_up_at, left)

    def _newly_finished(
        self, selection: Selection, since: tuple[datetime, str] | None, give_up_at: float | None
    ) -> Iterator[Job]:
        while True:
            with in_time(give_up_at):
                page = self._store.finished_since(selection, since, CHUNK)
            if not page:
                return
            yield from page
            last = page[-1]
            assert last.finished_at is not None
            since = (last.finished_at, last.id)


@contextmanager
def in_time(give_up_at: float | None) -> Iterator[None]:
    """Limit statements in this block to the caller's time; raises WaitTimeoutError when that is over."""
    with until(give_up_at):
        try:
            yield
        except DatabaseUnreachableError as error:
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise WaitTimeoutError(
                    f"whether the jobs are finished is not known in the time given: {error}"
                ) from error
            raise


def _slept(steps: Iterator[Job | float]) -> Iterator[Job]:
    for step in steps:
        if isinstance(step, Job):
            yield step
        else:
            time.sleep(step)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _id_list(jobs: str | Iterable[str]) -> Sequence[str]:
    if isinstance(jobs, str):
        return [jobs]
    return jobs if isinstance(jobs, Sequence) else list(jobs)
