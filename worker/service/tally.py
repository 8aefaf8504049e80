"""Counters of a worker beside those of its engine: how long claims and writes take, how jobs end.

It costs a few additions for each shard and each group of results, so it is always kept; `metrics` shows it.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from nightmill.jobs.base.contract import StopReason

Given = ParamSpec("Given")
Made = TypeVar("Made")

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends, in seconds. SQLite waits for its write lock for 30."""


class Durations:
    """A histogram of durations: the number in each bucket, the last of which has no end, and their sum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def timed(self, function: Callable[Given, Made]) -> Callable[Given, Made]:
        """Wrap a function so that the duration of each call is recorded, also of those that fail."""

        def measured(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.observe(time.perf_counter() - began)

        return measured

    def observe(self, seconds: float) -> None:
        """It took so long once more."""
        with self._lock:
            self._buckets[bisect_left(BUCKETS, seconds)] += 1
            self._sum += seconds

    def read(self) -> tuple[list[int], float]:
        """(times in each bucket, seconds in all)."""
        with self._lock:
            return list(self._buckets), self._sum


class Tally:
    """The counters of one worker."""

    def __init__(self) -> None:
        self.claims = Durations()  # of a shard
        self.writes = Durations()  # of a group of results
        self._lock = threading.Lock()
        self._ended: Counter[StopReason] = Counter()

    def ended(self, reasons: Iterable[StopReason]) -> None:
        """The results of these jobs were written."""
        with self._lock:
            self._ended.update(reasons)

    def written(self) -> int:
        """The number of jobs whose results were written."""
        with self._lock:
            return self._ended.total()

    def jobs(self) -> dict[StopReason, int]:
        """Jobs whose results were written, by stop reason."""
        with self._lock:
            return {reason: self._ended[reason] for reason in StopReason}
