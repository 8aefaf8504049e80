"""A cache of batch statuses for web pages: counting half a million rows takes a tenth of a second.

A small batch is counted at every view. A large one is counted repeatedly while it is viewed, and pages show
the last result, about a second old; the first viewer waits for a count. An ended batch is counted again only
after a change.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.reply.batch_status import BatchRecord, BatchStatus

LARGE_ROWS = 20_000  # counting them takes some 5 ms
EVERY_SECONDS = 1.0
COUNTING_SHARE = 4  # pause between counts, relative to the last one's duration
UNSEEN_SECONDS = 8.0  # after which counting stops; pages refresh every 3 s
_AT_ONCE = 3  # concurrent counts, as other statements use the same threads

Run = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments on a thread."""


class BatchStatusCache:
    """The statuses of batches being viewed. For one event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[str, _CachedStatus] = {}
        self._counting = asyncio.Semaphore(_AT_ONCE)

    async def of(self, batch: Batch) -> BatchStatus:
        """Return the status of a batch with its errors; raises any error of counting.

        The speed of a finished batch needs a full scan and may be missing at first.
        """
        cached = self._known.get(batch.name)
        if cached is None:
            cached = self._known[batch.name] = _CachedStatus(batch)
            cached.task = asyncio.ensure_future(self._keep(cached))
        cached.looked_at = time.monotonic()
        if cached.status is None:
            await asyncio.wait({cached.first, cached.task}, return_when=asyncio.FIRST_COMPLETED)
            if cached.status is None:
                await cached.task  # raises its error
        assert cached.status is not None
        return cached.status

    def forget(self, name: str) -> None:
        """Drop a changed batch: the next view waits for a count."""
        self._known.pop(name, None)

    async def _keep(self, cached: "_CachedStatus") -> None:
        """Count until nobody views the batch."""
        name = cached.batch.name
        try:
            while self._known.get(name) is cached:
                async with self._counting:
                    began = time.monotonic()
                    more = await self._run(cached.count)
                    took = time.monotonic() - began
                    if more and not cached.large:
                        more = await self._run(cached.count)
                if not cached.first.done():
                    cached.first.set_result(None)
                    if not cached.large:
                        break
                if more:
                    continue
                await asyncio.sleep(max(EVERY_SECONDS, COUNTING_SHARE * took))
                if time.monotonic() > cached.looked_at + UNSEEN_SECONDS:
                    break
        except NightmillError:
            if not cached.first.done():
                raise  # to those who wait; later errors are dropped, and the next view counts anew
        finally:
            if self._known.get(name) is cached:
                del self._known[name]


class _CachedStatus:
    """The cached status of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.status: BatchStatus | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Future[None] = self.first  # the counting task
        self.looked_at = 0.0
        self._end: tuple[BatchRecord, datetime | None] | None = None

    @property
    def large(self) -> bool:
        """True if it is not counted at every view."""
        return self.status is not None and self.status.rows >= LARGE_ROWS

    def count(self) -> bool:
        """Count again if something may have changed; returns True if another count should follow at once."""
        end = self.batch.store.end(self.batch.name)
        if self.status is None or end is None or end != self._end:
            self._end, self.status = end, self.batch.status(whole_pace=False)
            return end is not None
        if self.status.tokens_per_second is None and self.status.completion_tokens:
            self.status = self.batch.status()
        return False
