"""`jobs.aio`: what `jobs` does, beside everything else that an event loop has to do."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nightmill import jobs
from nightmill.jobs import aio
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import InvalidParameterError, JobNotFoundError, WaitTimeoutError
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.batches.rows import finish
from tests.support.servers import worker_env

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def default(sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """The client that the functions use; conftest closes it."""
    for name, value in worker_env(sqlite_settings).items():
        if name.startswith("NIGHTMILL_"):
            monkeypatch.setenv(name, value)
    yield jobs.default_client()


@pytest.fixture
def worker(default: Client) -> Claims:
    """A worker's side of the table."""
    claims = Claims(default.database, "a" * 32)
    claims.register("host", 1, "model", None)
    return claims


def test_every_function_of_jobs_is_there_with_its_arguments() -> None:
    functions = {
        name: getattr(jobs, name)
        for name in jobs.__all__
        if inspect.isfunction(getattr(jobs, name)) and name != "default_client"
    }
    ours = {name for name, value in vars(aio).items() if inspect.isfunction(value) and name[0] != "_"}
    assert ours - {"wraps", "embedding_of", "relevance_in", "scores_of"} == set(functions)
    for name, function in functions.items():
        arguments = inspect.signature(getattr(aio, name)).parameters
        assert list(arguments) == list(inspect.signature(function).parameters)
        assert {key: one.default for key, one in arguments.items()} == {
            key: one.default for key, one in inspect.signature(function).parameters.items()
        }


def test_a_jobs_whole_life_in_coroutines(worker: Claims) -> None:
    async def program() -> list[Any]:
        job_id = await aio.enqueue("one", max_tokens=3)
        ids = await aio.enqueue_many(["two", "three"], batch="night")
        batch = await aio.submit_batch(["four"], name="file")
        assert [(await aio.get_batch("file")).name] == [batch.name]
        assert len(await aio.list_batches()) == 2
        assert (await aio.get(job_id)).params.max_tokens == 3
        assert await aio.cancel(job_id) == "cancelled"
        assert (await aio.retry(job_id)).state == "queued"
        await asyncio.to_thread(finish, worker, await aio.list_jobs())
        await aio.wait([job_id, *ids], timeout=PATIENCE)
        await aio.wait(batch="file", timeout=PATIENCE)
        assert (await aio.stats())["state"] == {"succeeded": 4}
        assert await aio.cancel_batch("night") == (0, 0)
        return [job.text async for job in aio.results(batch="night")]

    assert asyncio.run(program()) == ["text of two", "text of three"]


def test_results_come_while_other_tasks_run(worker: Claims, default: Client) -> None:
    async def program() -> tuple[list[str | None], list[str | None]]:
        ids = list(await aio.enqueue_many(["a", "b", "c"], batch="night"))

        async def finishing() -> None:
            for job_id in reversed(ids):
                await asyncio.to_thread(finish, worker, [default.get(job_id)])
                await asyncio.sleep(0.01)

        async def read(order: Any) -> list[str | None]:
            return [job.prompt async for job in aio.results(batch="night", order=order, timeout=PATIENCE)]

        enqueued, finished, _ = await asyncio.gather(read("enqueued"), read("finished"), finishing())
        return enqueued, finished

    assert asyncio.run(program()) == (["a", "b", "c"], ["c", "b", "a"])


def test_whoever_waits_holds_no_thread_and_may_be_cancelled(worker: Claims, default: Client) -> None:
    async def program() -> list[str | None]:
        ids = list(await aio.enqueue_many(["a", "b"], batch="night"))
        await asyncio.to_thread(finish, worker, [default.get(ids[0])])
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in aio.results(ids, order="finished"):
                seen.set()

        waiting = [asyncio.create_task(aio.wait(ids)) for _ in range(100)]  # more than there are threads
        waiting += [asyncio.create_task(read())]
        async with asyncio.timeout(PATIENCE):
            await seen.wait()
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        await asyncio.to_thread(finish, worker, [default.get(ids[1])])  # nothing is broken
        await aio.wait(batch="night", timeout=PATIENCE)
        return [job.prompt async for job in aio.results(batch="night")]

    before = threading.active_count()
    assert asyncio.run(program()) == ["a", "b"]  # whose end waits for every thread
    assert threading.active_count() == before


def test_a_thousand_streams_hold_no_thread_and_end_with_their_texts(worker: Claims, default: Client) -> None:
    async def program() -> tuple[list[str], int]:
        ids = list(await aio.enqueue_many([f"prompt {number}" for number in range(1000)]))

        async def read(job_id: str) -> str:
            return "".join([piece async for piece in aio.stream(job_id, timeout=PATIENCE)])

        reading = [asyncio.create_task(read(job_id)) for job_id in ids]
        while len(default.following._readers) < len(ids):
            await asyncio.sleep(0.01)
        threads = threading.active_count()
        await asyncio.to_thread(finish, worker, default.list_jobs(limit=1000))
        return await asyncio.gather(*reading), threads

    before = threading.active_count()
    texts, threads = asyncio.run(program())
    assert texts == [f"text of prompt {number}" for number in range(1000)]
    assert threads <= before + 2 + 32  # the two that all share, and asyncio's own
    assert default.following._readers == {}


def test_errors_are_those_of_jobs() -> None:
    async def program() -> None:
        with pytest.raises(JobNotFoundError, match="there is no job 'x'"):
            async for _ in aio.stream("x"):
                pass
        with pytest.raises(WaitTimeoutError):
            async for _ in aio.stream(await aio.enqueue("a"), timeout=0.0):
                pass
        with pytest.raises(InvalidParameterError, match="after: must be"):
            async for _ in aio.stream("x", after="y"):
                pass
        with pytest.raises(JobNotFoundError, match="there is no job 'x'"):
            await aio.get("x")
        with pytest.raises(JobNotFoundError):
            await aio.wait("x")
        job_id = await aio.enqueue("a")
        with pytest.raises(WaitTimeoutError, match="1 job is not finished"):
            await aio.wait(job_id, timeout=0.0)
        with pytest.raises(WaitTimeoutError):
            async for _ in aio.results([job_id], timeout=0.0):
                pass
        with pytest.raises(InvalidParameterError, match="order: must be"):
            async for _ in aio.results([job_id], order="random"):  # type: ignore[arg-type]
                pass
        with pytest.raises(
            InvalidParameterError, match=r"^session: belongs to the thread that uses it; call"
        ):
            await aio.enqueue("a", session=object())  # type: ignore[arg-type]

    asyncio.run(program())
