"""Celery's flags that end a worker's process: signals set them, and so do we.

A flag is an exit code: None or False while nothing asks for the end, and 0 to end in order.
"""

import logging

from celery.worker import state

__all__ = ["end_as_failed", "end_in_order", "ends_otherwise", "exit_if_told", "told_to_end"]

log = logging.getLogger("nightmill.worker")


def told_to_end() -> bool:
    """True if a signal or a failure has asked this process to end."""
    return _is_set(state.should_stop) or _is_set(state.should_terminate)


def ends_otherwise() -> bool:
    """True if this process ends with an error, or is to end at once."""
    return bool(state.should_stop)


def end_in_order() -> None:
    """End this process in order, if nothing has asked for its end yet."""
    if not _is_set(state.should_stop):
        state.should_stop = 0


def end_as_failed(reason: str) -> None:
    """End this process with an error, for a supervisor to start it again."""
    log.critical("%s: this worker ends, for a supervisor to start it again", reason)
    state.should_stop = 1


def exit_if_told() -> None:
    """Raise SystemExit if a signal has asked for it, which has only set a flag."""
    state.maybe_shutdown()


def _is_set(flag: int | bool | None) -> bool:
    """True if a flag says to end: it is an exit code then, and 0 is one, which equals False."""
    return flag is not None and flag is not False
