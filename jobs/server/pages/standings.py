"""How batches stand, counted for all who look together: half a million rows take a tenth of a second.

A small batch is counted whenever somebody looks. A large one is counted again and again while somebody looks,
and pages show what was found last, which is about a second old; who comes after nobody has looked waits for a
count. If it has ended, it is counted again only once something has changed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from nightmill.jobs.batch_status import BatchRecord, BatchStatus
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.errors import NightmillError

LARGE_ROWS = 20_000  # that take some 5 ms to count
EVERY_SECONDS = 1.0
COUNTING_SHARE = 4  # of huge batches: it pauses for so many times what the last count took
UNSEEN_SECONDS = 8.0  # after which a batch is not counted any more; pages look every 3 s
_AT_ONCE = 3  # batches that are being counted, on the threads on which all else waits for SQL

Run = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments on a thread."""


class Standings:
    """Batches that somebody looks at. For one event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[str, _Standing] = {}
        self._counting = asyncio.Semaphore(_AT_ONCE)

    async def of(self, batch: Batch) -> BatchStatus:
        """How a batch stands, with its errors; raises what counting raises.

        How fast it was once it has ended, which reads all its rows, may come with the next look.
        """
        standing = self._known.get(batch.name)
        if standing is None:
            standing = self._known[batch.name] = _Standing(batch)
            standing.task = asyncio.ensure_future(self._keep(standing))
        standing.looked_at = time.monotonic()
        if standing.status is None:
            await asyncio.wait({standing.first, standing.task}, return_when=asyncio.FIRST_COMPLETED)
            if standing.status is None:
                await standing.task  # which raises
        assert standing.status is not None
        return standing.status

    def forget(self, name: str) -> None:
        """Something was done to it: whoever looks next waits for a count."""
        self._known.pop(name, None)

    async def _keep(self, standing: "_Standing") -> None:
        """Count until nobody looks."""
        name = standing.batch.name
        try:
            while self._known.get(name) is standing:
                async with self._counting:
                    began = time.monotonic()
                    more = await self._run(standing.count)
                    took = time.monotonic() - began
                    if more and not standing.large:
                        more = await self._run(standing.count)
                if not standing.first.done():
                    standing.first.set_result(None)
                    if not standing.large:
                        break
                if more:
                    continue
                await asyncio.sleep(max(EVERY_SECONDS, COUNTING_SHARE * took))
                if time.monotonic() > standing.looked_at + UNSEEN_SECONDS:
                    break
        except NightmillError:
            if not standing.first.done():
                raise  # to whoever waits; later, whoever looks next asks anew
        finally:
            if self._known.get(name) is standing:
                del self._known[name]


class _Standing:
    """One of them."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.status: BatchStatus | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Future[None] = self.first  # that counts
        self.looked_at = 0.0
        self._end: tuple[BatchRecord, datetime | None] | None = None

    @property
    def large(self) -> bool:
        """Whether it is not counted at every look."""
        return self.status is not None and self.status.rows >= LARGE_ROWS

    def count(self) -> bool:
        """Count again, if anything may be another; returns whether there is more to count at once."""
        end = self.batch.store.end(self.batch.name)
        if self.status is None or end is None or end != self._end:
            self._end, self.status = end, self.batch.status(whole_pace=False)
            return end is not None
        if self.status.tokens_per_second is None and self.status.completion_tokens:
            self.status = self.batch.status()
        return False
