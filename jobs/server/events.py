"""Server-sent events: their format, and what happens when the reader disconnects."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nightmill.jobs.errors import NightmillError
from nightmill.jobs.server.errors import HttpError, http_error_of

T = TypeVar("T")

PAUSE_SECONDS = 15.0
"""Silence after which a comment is sent, so that proxies and readers know that the stream is alive."""
COMMENT = ": still there\n\n"
DONE = "data: [DONE]\n\n"


def event(data: object, *, place: object = None) -> str:
    """Format one event: `data` as JSON on one line; `place` returns in Last-Event-ID."""
    known = "" if place is None else f"id: {place}\n"
    return f"{known}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """A response with the given events; `on_close` is called when it ends in any way."""

    def __init__(self, job_id: str, events: AsyncIterator[str], on_close: Callable[[], object]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-ID": job_id},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def begun(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Wait for the first event, then return the events; raises any error before it.

    So early errors determine the status of the response, and later ones become events.
    """
    first = await anext(events, None)

    async def all_of_them() -> AsyncIterator[str]:
        try:
            if first is not None:
                yield first
            async for one in events:
                yield one
        except (NightmillError, HttpError) as error:
            yield event(http_error_of(error).body)

    return all_of_them()


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Yield the items of all sources as they come, each with its source's number; raises any source's error.

    Each source is read by a task of its own, which waits until its last item was taken.
    """
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(index: int) -> None:
        try:
            async for item in sources[index]:
                await queue.put((index, item))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised where the items are read
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(index)) for index in range(len(sources))]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def together(
    items: AsyncIterator[tuple[int, T]], count: int, seconds: float
) -> AsyncIterator[tuple[int, T]]:
    """Yield the items of `count` sources, holding the first ones back until each source has yielded one.

    Items are held back for at most about `seconds` after the first.
    """
    held: list[tuple[int, T]] = []
    missing, first_at = set(range(count)), 0.0
    async for item in with_pauses(items, seconds):
        if item is not None:
            first_at = first_at or time.monotonic()
            held.append(item)
            missing.discard(item[0])
        if held and (not missing or time.monotonic() >= first_at + seconds):
            missing.clear()
            for one in held:
                yield one
            held.clear()
    for one in held:
        yield one


async def with_pauses(items: AsyncIterator[T], seconds: float | None = None) -> AsyncIterator[T | None]:
    """Yield the items, and None after each silence of this many seconds (PAUSE_SECONDS)."""
    seconds = PAUSE_SECONDS if seconds is None else seconds
    following = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=seconds)
            if not done:
                yield None
                continue
            if (item := following.result()) is None:
                return
            yield item
            following = asyncio.ensure_future(anext(items, None))
    finally:
        following.cancel()
