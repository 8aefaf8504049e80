"""Queries to the database or broker on threads of their own, as these may hang."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """A query whose concurrent callers share one execution."""

    def __init__(self, name: str, ask: Callable[[], T], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._asked: Future[T] | None = None

    async def answer(self) -> T | None:
        """Return the result; None if there is none in time."""
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(self._ask)
        waiting = asyncio.wrap_future(self._asked)
        done, _ = await asyncio.wait({waiting}, timeout=self._seconds)
        return waiting.result() if done else None

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
