"""Threads that must not end unseen, and processes that must not outlive others."""

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from nightmill.jobs.base.silence import Silence

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def watched_thread(name: str, run: Callable[[], None], on_failure: Callable[[str], None]) -> threading.Thread:
    """A daemon thread for `run`, not started yet.

    Whatever it raises was expected by nobody: a worker that lacks one of its threads only seems to live, so
    `on_failure` (given the reason) is to end it in order.
    """

    def watch() -> None:
        try:
            run()
        except Exception as error:
            reason = f"its thread {name!r} failed: {describe(error)}"
            log.critical("%s", reason, exc_info=True)
            on_failure(reason)

    return threading.Thread(target=watch, name=name, daemon=True)


def describe(error: BaseException) -> str:
    """An unexpected exception in a few words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def die_with_parent() -> None:
    """Have the kernel end this process with its parent: one that hangs would not see a pipe close.

    It would keep the GPU's memory, and no other worker could start there.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)


def end_threads(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for the end of threads that were told to end, `seconds` for all of them together."""
    give_up_at = time.monotonic() + seconds
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, give_up_at - time.monotonic()))
            if thread.is_alive():
                log.error("the thread %r does not end; it is left behind", thread.name)


class Rounds:
    """Watches threads that do something again and again: a round that does not end is a failure.

    Each wait has a limit of its own. This is for the one that was overlooked: a worker of which a thread
    hangs goes on claiming, or goes on beating, and only seems to live.
    """

    def __init__(self, seconds: float, over: threading.Event, on_failure: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._over = over
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._going: dict[int, tuple[str, Silence]] = {}
        self._thread = watched_thread("rounds", self._watch, on_failure)

    def start(self) -> None:
        """Begin to look; ends with the event `over`."""
        self._thread.start()

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """A round of this thread."""
        me = threading.get_ident()
        with self._lock:
            self._going[me] = name, Silence(self._seconds, 2 * _LOOK_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._going.pop(me, None)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with self._lock:
                hanging = [name for name, silence in self._going.values() if silence.too_long()]
            if hanging:
                self._on_failure(f"its chore {hanging[0]!r} has not ended for {self._seconds:.0f} s")
                return
