"""The end of a process that was told to end and does not: whatever hangs, it is gone in bounded time."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Self

from nightmill.jobs.silence import Silence

log = logging.getLogger(__name__)

END_SECONDS = 45.0
"""For everything else than draining: an engine that does not answer, a database that is away."""
_LOOK_SECONDS = 0.5


class LastResort:
    """A thread that waits for the order to end, and then for the end, which ends it, too.

    Started for the rest of the process, or in a `with` for as long as that lasts.

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
        self._over = threading.Event()
        self._ordered = ordered
        self._seconds = seconds
        self._abandon = abandon
        self._thread = threading.Thread(target=self._watch, name="last resort", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._ordered():
            if self._over.wait(_LOOK_SECONDS):
                return
        waited = Silence(self._seconds, 2 * _LOOK_SECONDS)
        while not waited.too_long():
            if self._over.wait(_LOOK_SECONDS):
                return
        log.critical(
            "this %s does not come to its end within %.0f s: it ends by force; others take over its work",
            self._what,
            self._seconds,
        )
        try:
            self._abandon()
        finally:
            os._exit(1)
