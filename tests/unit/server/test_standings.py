"""Counts of batches that pages share: never older than they say, and not made more often than needed."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.reply.batch_status import BatchStatus
from nightmill.jobs.server.pages import batch_status_cache
from nightmill.jobs.server.pages.batch_status_cache import BatchStatusCache


class Counting:
    """Runs counts, and remembers how many there were of what kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole: list[bool] = []
        status = Batch.status

        def counted(batch: Batch, **said: Any) -> BatchStatus:
            self.whole.append(said.get("whole_pace", True))
            return status(batch, **said)

        monkeypatch.setattr(Batch, "status", counted)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """At the next turn of the loop, as from a thread."""
        await asyncio.sleep(0)
        return function(*arguments)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Every batch is a large one, and time goes fast."""
    monkeypatch.setattr(batch_status_cache, "LARGE_ROWS", 0)
    monkeypatch.setattr(batch_status_cache, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(batch_status_cache, "COUNTING_SHARE", 0)
    yield Counting(monkeypatch)


async def until(condition: Callable[[], Any], look: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await look()
            await asyncio.sleep(0.01)


def test_all_who_look_share_the_counts_and_see_what_changed(
    client: Client, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.enqueue_many(["x"] * 3, batch="b")
    batch = client.get_batch("b")

    async def look() -> None:
        shown = BatchStatusCache(counting.run)
        found = await asyncio.gather(*(shown.of(batch) for _ in range(10)))
        assert {one.states[JobState.QUEUED] for one in found} == {3}
        assert len(counting.whole) == 1
        # What somebody else did is seen soon; what was done here, at once.
        client.enqueue("y", batch="b")
        seen: list[int] = []

        async def again() -> None:
            seen.append((await shown.of(batch)).states[JobState.QUEUED])

        await until(lambda: 4 in seen, again)
        assert seen == sorted(seen)
        batch.cancel()
        shown.forget("b")
        assert (await shown.of(batch)).states == {JobState.CANCELLED: 4}
        # One that has ended is left alone, until a row is retried.
        await asyncio.sleep(0.1)
        before = len(counting.whole)
        await asyncio.sleep(0.1)
        assert len(counting.whole) == before
        batch.retry_failed()
        await until(lambda: 4 in seen[-1:], again)
        # Who looks no longer is counted for no longer.
        monkeypatch.setattr(batch_status_cache, "UNSEEN_SECONDS", 0.0)
        await asyncio.sleep(0.1)
        before = len(counting.whole)
        await asyncio.sleep(0.1)
        assert len(counting.whole) == before
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(look())


def test_small_batches_are_counted_at_every_look_and_failures_are_told(
    client: Client, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_status_cache, "LARGE_ROWS", 2)
    batch = client.submit_batch([{"prompt": "x"}], name="b")

    async def look() -> None:
        shown = BatchStatusCache(counting.run)
        assert (await shown.of(batch)).states == {JobState.QUEUED: 1}
        batch.cancel()
        assert (await shown.of(batch)).states == {JobState.CANCELLED: 1}
        batch.delete()
        for _ in range(2):
            with pytest.raises(BatchNotFoundError):
                await shown.of(batch)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(look())
