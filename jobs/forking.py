"""What a child of os.fork must not share with its parent: connections, locks, sequences.

gunicorn with `preload`, Celery's prefork pool and multiprocessing fork programs that may have used a client
already. Two processes that talk over one connection get each other's answers, and a lock that another thread
held at the fork is never released in the child. So whoever has such things is told, and makes them anew.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

FORK_SECONDS = 2.0  # how long a fork waits for transactions of other threads


_watching: "WeakSet[Forkable]" = WeakSet()
_registry = threading.Lock()
_told: "list[Forkable]" = []  # those that were told of the fork under way


class Forkable:
    """Something that is told of forks, in the thread that forks, once it has called `watch_forks`."""

    def watch_forks(self) -> None:
        """Be told of forks from now on, for as long as this lives."""
        with _registry:
            _watching.add(self)

    def before_fork(self) -> None:
        """In the parent: put down what the child must not even inherit."""

    def after_fork_in_parent(self) -> None:
        """In the parent: go on."""

    def after_fork_in_child(self) -> None:
        """In the child, which has one thread: make everything anew that is shared, and close nothing."""


class Turnstile:
    """Counts the users of something; while it is closed it lets nobody in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Wait until it is open, and be inside for a while."""
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
        """Let nobody in, and wait until nobody is inside, `seconds` at most."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, seconds)

    def open(self) -> None:
        """Let everybody in."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()


def _before() -> None:
    _registry.acquire()  # until the fork is over: nobody comes or goes, and forks of two threads take turns
    _told[:] = _watching
    for thing in _told:
        thing.before_fork()


def _after_in_parent() -> None:
    try:
        for thing in _told:
            thing.after_fork_in_parent()
    finally:
        _told.clear()
        _registry.release()


def _after_in_child() -> None:
    try:
        for thing in _told:
            thing.after_fork_in_child()
    finally:
        _told.clear()
        _registry.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
