"""A measure of silence that is not fooled by a pause of the measuring process."""

import time
from collections.abc import Callable


class Silence:
    """A count of the time between looks, each of which counts at most `step` seconds.

    After a laptop's sleep or SIGSTOP the clock has advanced, though nobody could have spoken: a late look
    counts as one in time.
    """

    def __init__(self, limit: float, step: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.seconds = 0.0
        self._step = step
        self._clock = clock
        self._looked_at = clock()

    def broken(self) -> None:
        """Start over: something was heard."""
        self.seconds = 0.0
        self._looked_at = self._clock()

    def too_long(self) -> bool:
        """Return True once the silence has reached the limit. Call it at least every `step` seconds."""
        now = self._clock()
        self.seconds += min(now - self._looked_at, self._step)
        self._looked_at = now
        return self.seconds >= self.limit
