"""Protection of connections, locks and counters across os.fork, which parent and child must not share.

gunicorn with `preload`, Celery's prefork pool and multiprocessing fork programs that may have used a client
already. Two processes that talk over one connection get each other's answers, and a lock that another thread
held at the fork is never released in the child. Objects that own such things are notified and recreate them.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

FORK_SECONDS = 2.0  # longest wait of a fork for transactions of other threads


_watching: "WeakSet[Forkable]" = WeakSet()
_registry = threading.Lock()
_notified: "list[Forkable]" = []  # objects notified of the fork under way


class Forkable:
    """An object that is notified of forks, in the thread that forks, after it has called `watch_forks`."""

    def watch_forks(self) -> None:
        """Subscribe to notifications of forks for the lifetime of this object."""
        with _registry:
            _watching.add(self)

    def before_fork(self) -> None:
        """Called in the parent: release what the child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Called in the parent: resume."""

    def after_fork_in_child(self) -> None:
        """Called in the child, which has one thread: recreate everything shared, and close nothing."""


class Turnstile:
    """A counter of concurrent users that can be closed to new ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Enter once it is open, and leave at the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Admit nobody, and wait up to `seconds` until everybody has left."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, seconds)

    def open(self) -> None:
        """Admit everybody again."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()


def _before() -> None:
    # Until the fork is over: the registry must not change, and forks of two threads take turns.
    _registry.acquire()
    _notified[:] = _watching
    for thing in _notified:
        thing.before_fork()


def _after_in_parent() -> None:
    try:
        for thing in _notified:
            thing.after_fork_in_parent()
    finally:
        _notified.clear()
        _registry.release()


def _after_in_child() -> None:
    try:
        for thing in _notified:
            thing.after_fork_in_child()
    finally:
        _notified.clear()
        _registry.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
