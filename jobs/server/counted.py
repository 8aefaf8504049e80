"""Statements that count many rows, for whoever asks again and again: asked a small part of the time."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_FRESH_SECONDS = 1.0
_COUNTING_SHARE = 50


class Counted(Generic[T]):
    """What a statement finds, asked again only if the last answer is old for what it took.

    One thread at a time asks; others take the last answer meanwhile.
    """

    def __init__(self, ask: Callable[[], T], found: T) -> None:
        self.found = self._nothing = found
        self._ask = ask
        self._again_at = float("-inf")
        self._asking = threading.Lock()

    def forget(self) -> None:
        """Nothing is known any more."""
        self.found = self._nothing
        self._again_at = float("-inf")

    def look(self) -> None:
        """Ask, if it is time and nobody is asking."""
        if time.monotonic() < self._again_at or not self._asking.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            if began < self._again_at:  # somebody asked in between
                return
            self.found = self._ask()
            ended = time.monotonic()
            self._again_at = ended + max(_FRESH_SECONDS, _COUNTING_SHARE * (ended - began))
        finally:
            self._asking.release()
