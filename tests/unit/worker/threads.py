"""An engine behind its link in a thread of this process, so that a test can hold the engine."""

import threading
from collections.abc import Callable
from multiprocessing import Pipe

from worker.engine.engine import Engine
from worker.engine_link import EngineLink
from worker.engine_process import serve


def engine_in_thread(build: Callable[[], Engine]) -> EngineLink:
    """A link to an engine that a thread builds and runs, as the engine's process does."""
    ours, theirs = Pipe()

    def run() -> None:
        with theirs:
            serve(theirs, build)

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    return EngineLink(ours, thread)
