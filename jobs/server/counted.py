"""Cached results of expensive counting queries for frequent readers."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_FRESH_SECONDS = 1.0
_COUNTING_SHARE = 50


class Counted(Generic[T]):
    """The result of a query, refreshed only if it is old relative to the query's duration.

    One thread at a time executes the query; others use the last result.
    """

    def __init__(self, ask: Callable[[], T], found: T) -> None:
        self.found = self._nothing = found
        self._ask = ask
        self._again_at = float("-inf")
        self._asking = threading.Lock()

    def forget(self) -> None:
        """Drop the result."""
        self.found = self._nothing
        self._again_at = float("-inf")

    def look(self) -> None:
        """Refresh the result, if it is time and no other thread does."""
        if time.monotonic() < self._again_at or not self._asking.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            if began < self._again_at:  # another thread refreshed it meanwhile
                return
            self.found = self._ask()
            ended = time.monotonic()
            self._again_at = ended + max(_FRESH_SECONDS, _COUNTING_SHARE * (ended - began))
        finally:
            self._asking.release()
