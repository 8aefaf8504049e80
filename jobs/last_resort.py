"""The end of a process that was told to end and does not: whatever hangs, it is gone in bounded time."""

import logging
import os
import threading
import time
from collections.abc import Callable

from nightmill.jobs.silence import Silence

log = logging.getLogger(__name__)

END_SECONDS = 45.0
"""For everything else than draining: an engine that does not answer, a database that is away."""
_LOOK_SECONDS = 0.5


class LastResort:
    """A thread that waits for the order to end, and then for the end, which ends it, too.

    ordered  whether the process has been told to end
    abandon  what must not be left behind: called before the process ends by force
    what     what the process is, for the log
    """

    def __init__(
        self,
        ordered: Callable[[], bool],
        seconds: float,
        abandon: Callable[[], None] = lambda: None,
        what: str = "worker",
    ) -> None:
        self._what = what
        self._ordered = ordered
        self._seconds = seconds
        self._abandon = abandon
        self._thread = threading.Thread(target=self._watch, name="last resort", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _watch(self) -> None:
        while not self._ordered():
            time.sleep(_LOOK_SECONDS)
        waited = Silence(self._seconds, 2 * _LOOK_SECONDS)
        while not waited.too_long():
            time.sleep(_LOOK_SECONDS)
        log.critical(
            "this %s does not come to its end within %.0f s: it ends by force; others take over its work",
            self._what,
            self._seconds,
        )
        try:
            self._abandon()
        finally:
            os._exit(1)
