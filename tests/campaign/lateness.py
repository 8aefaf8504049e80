"""How late the machine is by itself: what a limit must not count against the product.

A thread sleeps and computes the same over and over. Where the sleep is too long or the work takes longer than
it did at its fastest, the time that was lost counts as lateness, of every call and every end that saw it.
"""

import hashlib
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_EVERY = 0.2
_WORK = bytes(1 << 20)


@dataclass(frozen=True)
class Late:
    """Seconds of time that were lost just before `at` (monotonic)."""

    at: float
    seconds: float


def lost(lateness: Sequence[Late], began: float, ended: float) -> float:
    """What was lost between two times; `lateness` is in the order of time."""
    first = bisect_left(lateness, began, key=lambda late: late.at)
    last = bisect_left(lateness, ended + _EVERY, key=lambda late: late.at)
    return sum(late.seconds for late in lateness[first:last])


class Watchdog:
    """Measures from the beginning of a `with` to its end."""

    def __init__(self) -> None:
        self.lateness: list[Late] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        fastest, before = float("inf"), time.monotonic()
        while not self._over.is_set():
            time.sleep(_EVERY)
            woken = time.monotonic()
            hashlib.sha256(_WORK).digest()
            now = time.monotonic()
            fastest = min(fastest, now - woken)
            # Of the whole time only this share was to be had; a sleep that was too long is lost as a whole.
            overslept = max(0.0, woken - before - _EVERY)
            seconds = overslept + (_EVERY + now - woken) * (1.0 - fastest / (now - woken))
            self.lateness.append(Late(now, min(seconds, now - before)))
            before = now
