"""A watchdog that ends a process which was told to end and hangs."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Self

from nightmill.jobs.base.silence import Silence

log = logging.getLogger(__name__)

END_SECONDS = 45.0
"""Seconds to shut down after draining, for example with a hung engine or an unreachable database."""
_LOOK_SECONDS = 0.5


class LastResort:
    """A thread that waits for the order to end, and then ends the process by force if it takes too long.

    `start` lasts for the rest of the process, a `with` block for its own duration.

    ordered  returns True once the process has been told to end
    abandon  cleans up before the process is ended by force
    what     name of the process for the log
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
        """Start the thread."""
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
