"""Server-sent events: how a stream of them is written, and what happens when its reader goes away."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PAUSE_SECONDS = 15.0
"""Without a word for so long, a comment is sent: proxies and readers know then that the stream lives."""
COMMENT = ": still there\n\n"
DONE = "data: [DONE]\n\n"


def event(data: object, *, place: object = None) -> str:
    """One event: `data` as JSON, which is one line; `place` comes back as Last-Event-ID."""
    known = "" if place is None else f"id: {place}\n"
    return f"{known}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """The answer whose events `events` makes; `on_close` is called when it is over, however that comes."""

    def __init__(self, job_id: str, events: AsyncIterator[str], on_close: Callable[[], object]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-ID": job_id},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """The items of all these as they come, each with its source's number."""
    pending = {asyncio.ensure_future(anext(source, None)): index for index, source in enumerate(sources)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                index = pending.pop(one)
                if (item := one.result()) is not None:
                    yield index, item
                    pending[asyncio.ensure_future(anext(sources[index], None))] = index
    finally:
        for one in pending:
            one.cancel()


async def with_pauses(items: AsyncIterator[T]) -> AsyncIterator[T | None]:
    """The items, and None whenever there was none for PAUSE_SECONDS."""
    following = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=PAUSE_SECONDS)
            if not done:
                yield None
                continue
            if (item := following.result()) is None:
                return
            yield item
            following = asyncio.ensure_future(anext(items, None))
    finally:
        following.cancel()
