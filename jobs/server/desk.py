"""Between HTTP and the client: hands jobs in for callers, waits for them, and shows callers their own.

Statements run on a few threads of their own, so that a slow database delays answers and not the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState
from nightmill.jobs.enqueueing import owned_key
from nightmill.jobs.errors import (
    DatabaseUnreachableError,
    JobNotFoundError,
    NightmillError,
    WaitTimeoutError,
)
from nightmill.jobs.ids import is_job_id
from nightmill.jobs.job import Job
from nightmill.jobs.pieces import START, Piece, Place
from nightmill.jobs.server.bodies import Bodies
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.keys import Caller, Keys
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.sql.patience import until

P = ParamSpec("P")
R = TypeVar("R")

STATEMENT_SECONDS = 8.0
"""For the statements of one step of a request; a database that takes longer counts as away."""
LOOK_SECONDS = 30.0
_GRACE_SECONDS = 1.0  # the thread itself gives up before the event loop does
DATABASE_THREADS = 8  # fewer than the pool has connections
_LONGEST_KEY = 128  # of an Idempotency-Key


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on."""

    requests: int = 1024  # open at once
    queued: int = 10_000  # jobs of one key
    batches: int = 100  # of one key that have not ended
    request_seconds: float = 600.0  # for an answer that somebody waits for
    file_bytes: int = 512 << 20  # of one file
    stored_bytes: int = 10 << 30  # of all files of one key
    keep_files: timedelta | None = None  # after which they are deleted
    grace_seconds: float = 30.0  # past its deadline a job is ended by a worker, if there is one


def idempotency_key(request: Request) -> str | None:
    """With which a request that comes again is the same; raises HttpError."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise invalid("Idempotency-Key", f"must have 1 to {_LONGEST_KEY} characters")
    return key


class Desk:
    """One server's way to jobs."""

    def __init__(self, client: Client, keys: Keys, limits: Limits) -> None:
        self.client = client
        self.keys = keys
        self.limits = limits
        self.bodies = Bodies()
        patience = timedelta(seconds=limits.request_seconds)
        self.waited_for = JobSpec.defaults({"deadline": patience}).waited_for()
        self._threads = ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="database")

    def close(self) -> None:
        """End the threads; one that still waits for the database does not hold up the end of the process."""
        self.bodies.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a statement on a thread; raises DatabaseUnreachableError after STATEMENT_SECONDS."""
        return await self._run(STATEMENT_SECONDS, partial(function, *args, **kwargs))

    async def look(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, with LOOK_SECONDS: for what counts or changes many rows, or reads files."""
        return await self._run(LOOK_SECONDS, partial(function, *args, **kwargs))

    async def _run(self, seconds: float, function: Callable[[], R]) -> R:
        """Where no thread is free in time the function is not run at all."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, _until, loop.time() + seconds, function)
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                return await running
        except TimeoutError:
            raise DatabaseUnreachableError(
                f"the database at {self.client.settings.safe_database_url} has not answered for "
                f"{seconds:.0f} s. Check that it runs"
            ) from None

    async def enqueue(self, caller: Caller, spec: JobSpec) -> str:
        """Hand in a job that somebody waits for; raises HttpError where nobody would run it."""
        caller.need_to_submit()
        if not await self.run(self.client.serving, spec.model):
            if spec.model is not None:
                await self.run(self.client.check_model, spec.model)  # that it is not known says more
            which = "" if spec.model is None else f" that serves {spec.model!r}"
            raise HttpError(503, f"there is no live worker{which}; try again later", code="not_served")
        return await self.queue(caller, spec)

    async def queue(self, caller: Caller, spec: JobSpec) -> str:
        """Hand in a job, whenever it may be run; raises HttpError where its owner has too many queued."""
        caller.need_to_submit()
        return await self.run(self._queue, caller.name, spec)

    def _queue(self, owner: str | None, spec: JobSpec) -> str:
        most, key = self.limits.queued, spec.idempotency_key
        if (
            owner is not None
            and self.client.store.count_queued(owner) >= most
            and not (key and self.client.store.has_key(owned_key(owner, key)))  # it is there already
        ):
            said = f"{most:,} jobs of this key are queued already; try again later"
            raise HttpError(429, said, code="queue_full")
        return self.client.enqueue_spec(spec, owner=owner)

    async def job(self, caller: Caller, job_id: str) -> Job:
        """A caller's job; raises JobNotFoundError also for another's."""
        job = await self.run(self.client.get, job_id) if is_job_id(job_id) else None
        if job is None or not caller.sees(job.owner):
            raise JobNotFoundError(f"there is no job {job_id!r}")
        return job

    async def cancel(self, caller: Caller, job_id: str) -> Job:
        """Cancel a caller's job; returns it as it stands then."""
        job = await self.job(caller, job_id)
        caller.need_to_change(job.owner)
        await self.run(self.client.cancel, job_id)
        return await self.run(self.client.get, job_id)

    def pieces(
        self, job_id: str, place: Place = START, answer: int = 0, *, told: bool = False
    ) -> AsyncIterator[Piece]:
        """The text of a job, or of another of its answers, as it comes; with log-probabilities if `told`."""
        patience = self.limits.request_seconds + self.limits.grace_seconds
        return self.client.following.pieces_async(job_id, place, patience, answer, told=told)

    async def finished(self, request: Request, job_id: str, *, cancel: bool) -> Job:
        """A job once it has ended; if the caller goes away before, it is cancelled if `cancel`."""
        ending = asyncio.ensure_future(self._end_of(job_id))
        leaving = asyncio.ensure_future(caller_left(request))
        try:
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise HttpError(499, "the caller has gone", code="gone")
            return ending.result()
        finally:
            leaving.cancel()
            if not ending.done():
                ending.cancel()
                if cancel:
                    self.cancel_later(job_id)

    def cancel_later(self, job_id: str) -> None:
        """Cancel a job for which nobody waits any more, without waiting for that."""
        with suppress(RuntimeError):  # the server ends and takes no more statements
            self._threads.submit(self._cancel, job_id)

    def _cancel(self, job_id: str) -> JobState | None:
        with suppress(NightmillError):  # it has ended by now, or meets its deadline
            return self.client.cancel(job_id)
        return None

    async def _end_of(self, job_id: str) -> Job:
        try:
            async for _ in self.pieces(job_id):
                pass
        except WaitTimeoutError:
            raise HttpError(
                504, f"job {job_id} is not finished in time; it goes on", code="timeout"
            ) from None
        return await self.run(self.client.get, job_id)


def _until(moment: float, function: Callable[[], R]) -> R:
    """Call it, with statements that end by this moment; the event loop counts as `time.monotonic` does."""
    with until(moment):
        return function()


async def caller_left(request: Request) -> None:
    """Return once the caller has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
