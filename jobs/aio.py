"""asyncio versions of the functions of `jobs`; SQL runs in threads.

`wait`, `results` and `stream` occupy no thread while they wait.

    from nightmill.jobs import aio

    job_id = await aio.enqueue("Write a haiku about rain", max_tokens=64)
    await aio.wait(job_id, timeout=60)
    async for piece in aio.stream(job_id):
        print(piece, end="", flush=True)
    async for job in aio.results(batch="tonight"):
        print(job.custom_id, job.text)

Arguments, results and errors are those of `jobs`. A cancelled `await` stops waiting at once, but a statement
that was sent is still executed, so a job may have been queued. For a `Client` or
`Batch` of your own: `await asyncio.to_thread(batch.status)`. For a transaction of your own, with SQLAlchemy's
AsyncSession: `await session.run_sync(lambda own: jobs.enqueue("...", session=own))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from nightmill import jobs as _jobs
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.job import Job, embedding_of, relevance_in, scores_of

if TYPE_CHECKING:
    from nightmill.jobs.base.contract import Prompt
    from nightmill.jobs.batches.waiting import Order
    from nightmill.jobs.reply.embeddings import Embedding
    from nightmill.jobs.reply.logprobs import Scores
    from nightmill.jobs.request.fields import JobSettings
    from nightmill.jobs.streams.pieces import Piece, TextPosition

P = ParamSpec("P")
R = TypeVar("R")


def _threaded(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("session") is not None:
            raise InvalidParameterError(
                "session: belongs to the thread that uses it; call "
                "`await session.run_sync(lambda own: jobs.enqueue(..., session=own))`",
                field="session",
            )
        return await asyncio.to_thread(function, *args, **kwargs)

    return call


enqueue = _threaded(_jobs.enqueue)
enqueue_many = _threaded(_jobs.enqueue_many)
submit_batch = _threaded(_jobs.submit_batch)
try_rows = _threaded(_jobs.try_rows)
get_batch = _threaded(_jobs.get_batch)
list_batches = _threaded(_jobs.list_batches)
verify = _threaded(_jobs.verify)
get = _threaded(_jobs.get)
cancel = _threaded(_jobs.cancel)
cancel_batch = _threaded(_jobs.cancel_batch)
retry = _threaded(_jobs.retry)
list_jobs = _threaded(_jobs.list_jobs)
stats = _threaded(_jobs.stats)
workers = _threaded(_jobs.workers)


async def wait(
    jobs: str | Iterable[str] | None = None, *, batch: str | None = None, timeout: float | None = None
) -> None:
    """Return when the jobs (an id, ids, or a batch) are all final; raises WaitTimeoutError."""
    client = await asyncio.to_thread(_jobs.default_client)
    async for _ in _driven(client.waiting.steps_to_end(jobs, batch, timeout)):
        pass


async def score(
    prompt: Prompt,
    texts: Sequence[str],
    *,
    timeout: float | None = None,
    **settings: Unpack[JobSettings],
) -> Scores:
    """Compute how likely each text is after a prompt. See Client.score."""
    from nightmill.jobs.client.computing import to_score

    settings["score"] = to_score(texts)
    job_id = await enqueue(prompt, **settings)
    await wait(job_id, timeout=timeout)
    return scores_of(await get(job_id))


async def embed_many(
    texts: Iterable[Prompt], *, timeout: float | None = None, **settings: Unpack[JobSettings]
) -> list[Embedding]:
    """Compute the embedding of each text, in their order. See Client.embed_many."""
    settings["embed"] = True
    job_ids = await enqueue_many(texts, **settings)
    return [embedding_of(job) async for job in results(job_ids, timeout=timeout)]


async def rerank(
    query: str, documents: Iterable[str], *, timeout: float | None = None, **settings: Unpack[JobSettings]
) -> list[float]:
    """Compute how relevant each document is for a query, 0 to 1, in their order. See Client.rerank."""
    settings["rerank"] = query
    job_ids = await enqueue_many(documents, **settings)
    return [relevance_in(job) async for job in results(job_ids, timeout=timeout)]


async def results(
    jobs: Iterable[str] | None = None,
    *,
    batch: str | None = None,
    order: Order = "enqueued",
    wait: bool = True,
    timeout: float | None = None,
) -> AsyncIterator[Job]:
    """Yield finished jobs in the order of enqueueing or as they finish. See Client.results."""
    client = await asyncio.to_thread(_jobs.default_client)
    async for job in _driven(client.waiting.steps_to_results(jobs, batch, order, wait, timeout)):
        yield job


async def stream(
    job_id: str, *, answer: int = 0, after: TextPosition | str | None = None, timeout: float | None = None
) -> AsyncIterator[Piece]:
    """Yield the text of a job in pieces while it is generated. See Client.stream."""
    client = await asyncio.to_thread(_jobs.default_client)
    async for piece in client.stream_async(job_id, answer=answer, after=after, timeout=timeout):
        yield piece


async def _driven(steps: Iterator[Job | float]) -> AsyncIterator[Job]:
    """Yield the jobs among these steps; a step that is a number is a pause, slept on the event loop."""
    while (step := await asyncio.to_thread(next, steps, None)) is not None:
        if isinstance(step, Job):
            yield step
        else:
            await asyncio.sleep(step)
