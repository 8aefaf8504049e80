"""When the engine's process looks for garbage that reference counts leave: not while the GPU would wait.

A full collection visits every object. With 1,024 sequences and their pages those are 180,000, which took
121 ms on a small machine, and Python starts one in the middle of a night, whenever a quarter more objects are
alive. Cycles are rare in this process, so seldom is enough.
"""

import gc
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["QuietCollector"]

IDLE_SECONDS, BUSY_SECONDS = 10.0, 300.0  # between two collections, at least


class QuietCollector:
    """Within its `with` block nothing is collected but by `look`, and what is alive at its start never.

    Whoever has frozen objects before it keeps all of them frozen afterwards: Python cannot tell them apart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = 0.0
        self._frozen_before = False

    def __enter__(self) -> "QuietCollector":
        self._frozen_before = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        gc.disable()
        self._looked_at = self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._frozen_before:
            gc.unfreeze()
        gc.enable()

    def look(self, *, idle: bool) -> None:
        """Collect, if it was not done lately. `idle`: there is nothing to generate."""
        now = self._clock()
        if now - self._looked_at >= (IDLE_SECONDS if idle else BUSY_SECONDS):
            gc.collect()
            self._looked_at = now
