"""Reads the weights of the next model into the system's page cache, while the last rows of this one end."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nightmill.worker.watched import watched_thread

log = logging.getLogger(__name__)

SHARE = 0.5
"""The part of the available memory that a file may fill: the rest is for those who work now."""
_PIECE = 4 << 20
_LEAST_PRIORITY = 19
_END_SECONDS = 5.0


class Warmer:
    """Reads the files of one model after another, on a thread that yields to all others.

    What is read stays in the system's cache for as long as it has memory for it; nothing is kept here.
    """

    def __init__(
        self,
        on_failure: Callable[[str], None],
        available: Callable[[], int] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._available = available or _available
        self._warmed: str | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def warm(self, model: str, files: Sequence[Path]) -> None:
        """Begin to read the files of a model, unless they were the last to be read, or others still are."""
        if model == self._warmed or (self._thread is not None and self._thread.is_alive()):
            return
        self._warmed = model
        self._thread = watched_thread("weights", lambda: self._read(files), self._on_failure)
        self._thread.start()

    def close(self) -> None:
        """End the reading."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _read(self, files: Sequence[Path]) -> None:
        with suppress(OSError):  # without it, it reads at the priority of the others
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        left = int(SHARE * self._available())
        piece = memoryview(bytearray(_PIECE))
        for path in files:
            try:
                with path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                    while not self._closing.is_set() and left > 0 and (read := file.readinto(piece[:left])):
                        left -= read
            except OSError as error:  # whoever loads it will say so
                log.debug("%s was not read ahead: %s", path, error)


def _available() -> int:
    """Return the bytes of memory that the system could give away, caches included; 0 if it does not say."""
    with suppress(OSError, ValueError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return 0
