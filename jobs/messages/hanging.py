"""A broker that hangs costs one thread its time, and nobody else theirs.

A Redis that is away refuses at once. One that hangs (suspended, swapped out, behind a dead route) makes each
caller wait for its time limit, so that a server's threads and a program's night are used up by waiting. Once
a caller has waited in vain, others are refused at once for a while; then one of them tries again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightmill.jobs.errors import BrokerUnreachableError

ANSWER_SECONDS = 5.0
"""How long Redis may take to answer a command."""
_SLOW_SECONDS = 2.0  # whoever fails sooner was refused
_PAUSE_SECONDS = 5.0


class SilentBrokerError(BrokerUnreachableError):
    """The broker is there, and does not answer."""


class HangGuard:
    """Remembers that a broker hangs. Safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refuse_until: float | None = None
        self._trying = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Use the broker in this block; raises SilentBrokerError at once if it hung a moment ago."""
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
        except BaseException:  # it says nothing of the broker: the next one tries
            self._note(self._clock() if hung else None)
            raise
        self._note(None)

    def _note(self, refuse_until: float | None) -> None:
        with self._lock:
            self._refuse_until, self._trying = refuse_until, False
