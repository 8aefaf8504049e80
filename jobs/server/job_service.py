"""Jobs for HTTP callers: enqueueing with limits, waiting, and access to the caller's own jobs.

Statements run on dedicated threads, so that a slow database delays answers and not the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import ceil
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from nightmill.jobs.base.arithmetic import system_fingerprint
from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.client.client import Client
from nightmill.jobs.client.enqueueing import Enqueued, owned_key
from nightmill.jobs.errors import (
    DatabaseUnreachableError,
    JobNotFoundError,
    NightmillError,
    WaitTimeoutError,
)
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.bodies import Bodies
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.server.events import merged
from nightmill.jobs.server.keys import ApiKeys, Caller
from nightmill.jobs.server.looking import SharedQuery
from nightmill.jobs.server.tiers import Tier, asked_tier
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.patience import until
from nightmill.jobs.streams.pieces import START, Piece, TextPosition

P = ParamSpec("P")
R = TypeVar("R")

STATEMENT_SECONDS = 8.0
"""Limit for the statements of one step of a request; a slower database counts as unreachable."""
LOOK_SECONDS = 30.0
_BROKER_SECONDS = 2.0  # for a broker to refuse; a slower one hangs, and gets the job later
_GRACE_SECONDS = 1.0  # the thread itself gives up before the event loop does
DATABASE_THREADS = 8  # fewer than the pool has connections
FLEX_THREADS = 2
"""Most of these threads that flex calls use at once. Beside 64 connections with flex calls an
interactive call took 0.74 s in the median with all 8, 0.35 with 3, 0.19 with 2 and 0.16 with 1, alone 0.11;
with 2 the flex calls were 10% slower than with 8, with 1 half as fast (20,000 calls, 2 busy cores)."""
TURN_SECONDS = 60
"""Retry-After for a model that is not loaded: a turn of another lasts minutes."""
_LONGEST_KEY = 128  # characters of an Idempotency-Key


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server."""

    requests: int = 1024  # open requests
    queued: int = 10_000  # queued jobs of one key
    batches: int = 100  # unfinished batches of one key
    request_seconds: float = 600.0  # for an interactive answer
    flex_seconds: float = 600.0  # for an answer of the tier `flex`
    file_bytes: int = 512 << 20  # bytes of one file
    stored_bytes: int = 10 << 30  # bytes of all files of one key
    keep_files: timedelta | None = None  # after which they are deleted
    grace_seconds: float = 30.0  # after its deadline, for a worker to end the job


def idempotency_key(request: Request) -> str | None:
    """Return the Idempotency-Key of a request; raises HttpError."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise invalid("Idempotency-Key", f"must have 1 to {_LONGEST_KEY} characters")
    return key


class JobService:
    """One server's access to jobs."""

    def __init__(self, client: Client, keys: ApiKeys, limits: ServerLimits) -> None:
        self.client = client
        self.keys = keys
        self.limits = limits
        self.bodies = Bodies()
        self.interactive_defaults = self.defaults(Tier.DEFAULT)
        self._flex_turns = asyncio.Semaphore(FLEX_THREADS)
        self._threads = ThreadPoolExecutor(DATABASE_THREADS, thread_name_prefix="database")
        self._refusal = SharedQuery("broker", client.broker.refusal, _BROKER_SECONDS)

    def defaults(self, tier: Tier) -> JobSpec:
        """Return the defaults for jobs of this tier."""
        spec = JobSpec.defaults({"deadline": timedelta(seconds=self.seconds(tier))})
        return spec if tier is Tier.FLEX else spec.as_interactive()

    def seconds(self, tier: Tier) -> float:
        """Return the longest time for an answer of this tier."""
        return self.limits.flex_seconds if tier is Tier.FLEX else self.limits.request_seconds

    def close(self) -> None:
        """End the threads; one that still waits for the database does not delay the end of the process."""
        self.bodies.close()
        self._refusal.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a statement on a thread; raises DatabaseUnreachableError after STATEMENT_SECONDS."""
        return await self._run(STATEMENT_SECONDS, partial(function, *args, **kwargs))

    async def look(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a statement like `run`, with LOOK_SECONDS: for counting or changing many rows, or reading
        files."""
        return await self._run(LOOK_SECONDS, partial(function, *args, **kwargs))

    async def _run(self, seconds: float, function: Callable[[], R]) -> R:
        """Run a function if a thread becomes free in time. Flex calls wait for a turn first."""
        async with self._flex_turns if asked_tier.get() is Tier.FLEX else nullcontext():
            return await self._run_now(seconds, function)

    async def _run_now(self, seconds: float, function: Callable[[], R]) -> R:
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
        """Queue an interactive job; raises HttpError if no worker would run it."""
        return (await self.enqueue_request(caller, [spec])).request_id

    async def enqueue_request(
        self, caller: Caller, specs: Sequence[JobSpec], field: str = "prompt"
    ) -> Enqueued:
        """Queue all jobs of a request or none; they name one model. Raises like `enqueue`.

        field  the key of the request that has its prompts
        """
        caller.need_to_submit()
        model = specs[0].model
        if not await self.run(self.client.worker_store.serving, model):
            if model is not None:
                # An unknown model is the better error.
                await self.run(self.client.enqueueing.check_model, model)
            await self._need_one_that_will_serve(model)
        # A hanging or unreachable broker gets it later; a refused job would never be sent.
        if await self._refusal.answer():
            raise HttpError(503, "the broker accepts no jobs now; try again later", code="unavailable")
        return await self.run(self._queue, caller.name, specs, field)

    async def _need_one_that_will_serve(self, model: str | None) -> None:
        """Return if the job would wake a worker, or have its model loaded; raises HttpError if not."""
        asleep = await self.run(self.client.worker_store.sleeping, model)
        in_turn = [] if model is None else await self.run(self.client.worker_store.could_serve, model)
        if any(worker.wakes_for_jobs for worker in (*asleep, *in_turn)):
            return
        awake = [worker for worker in in_turn if not worker.rests]
        # A call of the tier `flex` waits as a row of a batch does, which is for the model's turn.
        if any(worker.swap_for_interactive or worker.is_idle for worker in awake) or (
            awake and asked_tier.get() is Tier.FLEX
        ):
            return
        if awake:
            raise HttpError(
                503,
                f"the model {model!r} is not loaded now: its worker serves {awake[0].model!r}, and loads "
                "others in their turn; try again later, or submit a batch, which waits for it",
                code="not_loaded",
                headers={"Retry-After": str(TURN_SECONDS)},
            )
        which = "" if model is None else f" that serves {model!r}"
        if asleep := (asleep or in_turn):
            said = f"each worker{which} sleeps, {asleep[0].detail}; submit a batch, which waits for it"
            now = await self.run(self.client.database.now)
            openings = [moment for worker in asleep if (moment := worker.wakes_at(now)) is not None]
            # In seconds, as clients read it: until the hour at which the first of them wakes.
            headers = {"Retry-After": str(ceil((min(openings) - now).total_seconds()))} if openings else None
            raise HttpError(503, said, code="not_served", headers=headers)
        raise HttpError(503, f"there is no live worker{which}; try again later", code="not_served")

    async def queue(self, caller: Caller, spec: JobSpec) -> str:
        """Queue a job without requiring a live worker; raises HttpError if its owner has too many queued."""
        caller.need_to_submit()
        return (await self.run(self._queue, caller.name, [spec])).request_id

    def _queue(self, owner: str | None, specs: Sequence[JobSpec], field: str = "prompt") -> Enqueued:
        most, key = self.limits.queued, specs[0].idempotency_key
        if owner is not None and len(specs) > most:
            said = f"has {len(specs):,} prompts, and a key may have {most:,} jobs queued; give fewer"
            raise invalid(field, said)
        if (
            owner is not None
            and self.client.store.count_queued(owner) + len(specs) > most
            and not (key and self.client.store.has_key(owned_key(owner, key)))  # the job exists already
        ):
            said = f"of the {most:,} jobs that a key may have queued, too many are; try again later"
            raise HttpError(429, said, code="queue_full")
        return self.client.enqueueing.enqueue_request(specs, owner=owner)

    async def fingerprint(self, model: str | None) -> str | None:
        """Return the fingerprint for a job just queued for this model; None if its workers differ."""
        workers = await self.run(self.client.worker_store.serving, model)
        found = {system_fingerprint(worker.arithmetic) for worker in workers}
        return found.pop() if len(found) == 1 else None

    async def job(self, caller: Caller, job_id: str) -> Job:
        """Return a caller's job; raises JobNotFoundError, also for another caller's."""
        job = await self.run(self.client.get, job_id) if is_job_id(job_id) else None
        if job is None or not caller.sees(job.owner):
            raise JobNotFoundError(f"there is no job {job_id!r}")
        return job

    async def cancel(self, caller: Caller, job_id: str) -> Job:
        """Cancel a caller's job; returns its new state."""
        job = await self.job(caller, job_id)
        caller.need_to_change(job.owner)
        await self.run(self.client.cancel, job_id)
        return await self.run(self.client.get, job_id)

    async def cancel_request(self, caller: Caller, request_id: str) -> list[Job]:
        """Cancel the unfinished jobs of a caller's request with several prompts; returns all its jobs."""
        chosen = Selection(request_id=request_id, owner=caller.only)
        found = await self.look(self.client.store.find, chosen)
        if not found:
            raise JobNotFoundError(f"there is no request {request_id[:100]!r} with several prompts")
        caller.need_to_change(found[0].owner)
        await self.look(self.client.store.cancel_all, [job.id for job in found])
        return await self.look(self.client.store.find, chosen)

    def pieces(
        self,
        job_id: str,
        place: TextPosition = START,
        answer: int = 0,
        *,
        with_logprobs: bool = False,
        with_counts: bool = False,
    ) -> AsyncIterator[Piece]:
        """Yield the text of a job's answer as it grows, with log-probabilities or numbers of tokens on
        request."""
        patience = self.seconds(asked_tier.get()) + self.limits.grace_seconds
        return self.client.following.pieces_async(
            job_id, place, patience, answer, with_logprobs=with_logprobs, with_counts=with_counts
        )

    async def followed(
        self, job_id: str, answers: int = 1, *, with_logprobs: bool = False, with_counts: bool = False
    ) -> AsyncIterator[tuple[int, Piece] | Job]:
        """Yield the pieces of a job's answers, each with the answer's number, then the ended job."""
        texts = [
            self.pieces(job_id, answer=number, with_logprobs=with_logprobs, with_counts=with_counts)
            for number in range(answers)
        ]
        async for piece in merged(texts):
            yield piece
        yield await self.run(self.client.get, job_id)

    async def finished(self, request: Request, job_id: str, *, cancel: bool) -> Job:
        """Return a job once it has ended; with `cancel`, a disconnect of the caller cancels it."""
        leave = partial(self.cancel_later, job_id) if cancel else lambda: None
        return await attended(request, self.end_of(job_id), leave)

    def cancel_later(self, *job_ids: str) -> None:
        """Cancel jobs in the background, as nobody waits for them any more."""
        with suppress(RuntimeError):  # the server is ending and accepts no more statements
            self._threads.submit(self._cancel, job_ids)

    def _cancel(self, job_ids: Sequence[str]) -> None:
        with suppress(NightmillError):  # the jobs will meet their deadline
            self.client.store.cancel_all(job_ids)

    async def end_of(self, job_id: str) -> Job:
        """Return a job once it has ended; raises HttpError if that takes too long."""
        try:
            async for _ in self.pieces(job_id):
                pass
        except WaitTimeoutError:
            raise HttpError(
                504, f"job {job_id} did not finish in time; it continues", code="timeout"
            ) from None
        return await self.run(self.client.get, job_id)


def _until(moment: float, function: Callable[[], R]) -> R:
    """Call the function with statements limited to this moment, on the clock of the event loop
    (`time.monotonic`)."""
    with until(moment):
        return function()


async def attended(request: Request, work: Coroutine[Any, Any, R], on_leave: Callable[[], object]) -> R:
    """Return the result of `work`; if the caller disconnects first, cancel it and raise HttpError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(caller_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HttpError(499, "the caller has gone", code="gone")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            on_leave()


async def caller_left(request: Request) -> None:
    """Return once the caller has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
