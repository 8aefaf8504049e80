"""Threads that must not end unseen."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


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
