"""An engine behind its link in a thread of this process, so that a test can hold the engine."""

import threading
from collections.abc import Callable
from multiprocessing import Pipe

from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.garbage import QuietCollector
from nightmill.worker.link.link import EngineLink
from nightmill.worker.link.process import serve


class _Thread(threading.Thread):
    """As a host: what cannot be killed ends by itself."""

    killed = False

    def kill(self) -> None:
        self.killed = True


class _Uncollected(QuietCollector):
    """Leaves the garbage of the tests alone: to go through all they hold takes a quarter of a second."""

    def __enter__(self) -> "_Uncollected":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def look(self, *, idle: bool) -> None:
        pass


def engine_in_thread(build: Callable[[], Engine], *, hang_seconds: float = 60.0) -> EngineLink:
    """A link to an engine that a thread builds and runs, as the engine's process does."""
    ours, theirs = Pipe()

    def run() -> None:
        with theirs:
            serve(theirs, build, _Uncollected())

    thread = _Thread(target=run, name="engine", daemon=True)
    thread.start()
    return EngineLink(ours, thread, hang_seconds=hang_seconds)
