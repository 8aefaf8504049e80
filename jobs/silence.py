"""How long somebody has said nothing, by a measure that a pause of this very process does not move."""

import time
from collections.abc import Callable


class Silence:
    """Counts the time between looks, each no more than `step` seconds.

    After a laptop's sleep or SIGSTOP the clock has gone on, and nobody could have spoken meanwhile: a look
    that comes late counts as one that came in time.
    """

    def __init__(self, limit: float, step: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.seconds = 0.0
        self._step = step
        self._clock = clock
        self._looked_at = clock()

    def broken(self) -> None:
        """Something was heard: begin anew."""
        self.seconds = 0.0
        self._looked_at = self._clock()

    def too_long(self) -> bool:
        """Whether the silence has lasted for the limit. Call it at least every `step` seconds."""
        now = self._clock()
        self.seconds += min(now - self._looked_at, self._step)
        self._looked_at = now
        return self.seconds >= self.limit
