"""A circuit breaker for a hanging broker: one thread waits, others are refused at once.

An unreachable Redis refuses at once. A hanging one (suspended, swapped out, behind a dead route) makes each
caller wait for its time limit, which would use up a server's threads. Once a caller has timed out, others are
refused at once for a while; then one of them tries again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightmill.jobs.errors import BrokerUnreachableError

ANSWER_SECONDS = 5.0
"""Longest time for Redis to answer a command, in seconds."""
_SLOW_SECONDS = 2.0  # a sooner failure is a refusal
_PAUSE_SECONDS = 5.0


class SilentBrokerError(BrokerUnreachableError):
    """The broker runs and does not answer."""


class HangGuard:
    """The state of the circuit breaker. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refuse_until: float | None = None
        self._trying = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Use the broker in this block; raises SilentBrokerError at once if it hung recently."""
        with self._lock:
            hung = self._refuse_until is not None
            if self._refuse_until is not None and (self._trying or self._clock() < self._refuse_until):
                raise SilentBrokerError(
                    f"the broker did not answer for {ANSWER_SECONDS:.0f} s and is tried again every "
                    f"{_PAUSE_SECONDS:.0f} s. Check that Redis runs and is not suspended"
                )
            self._trying = hung
        began = self._clock()
        try:
            yield
        except BrokerUnreachableError:
            slow = self._clock() - began >= _SLOW_SECONDS
            self._note(self._clock() + _PAUSE_SECONDS if slow or hung else None)
            raise
        except BaseException:  # not an error of the broker: the next caller tries
            self._note(self._clock() if hung else None)
            raise
        self._note(None)

    def _note(self, refuse_until: float | None) -> None:
        with self._lock:
            self._refuse_until, self._trying = refuse_until, False
