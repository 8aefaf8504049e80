"""The one thread that owns the engine: other threads hand it commands, it hands out completions.

A CUDA context belongs to the thread that made it, so the engine is built on this thread too.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from worker.engine.engine import Engine
from worker.engine.request import Completion, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

_HANG_SECONDS = 30.0  # far beyond any step; after this a step is taken to be stuck for good


class _Answer(Generic[T]):
    """A value that one thread waits for and another sets."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def resolve(self, compute: Callable[[], T]) -> None:
        try:
            self._value = compute()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._event.set()

    def wait(self) -> T:
        self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class EngineThread:
    """Runs an engine until told to stop.

    `on_completion` and `on_failure` are called on the engine thread and must be quick. After a failure
    (the runner raised) the thread is over: nothing more is completed.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_completion: Callable[[Completion], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._on_completion = on_completion
        self._on_failure = on_failure
        self._inbox: SimpleQueue[Callable[[Engine], None]] = SimpleQueue()
        self._stopping = False
        self._built: _Answer[Engine] = _Answer()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        """Build the engine on its thread; returns it (for its counters) or raises what building raised."""
        self._thread.start()
        return self._built.wait()

    def submit(self, request: Request) -> None:
        """Queue a request; its completion arrives through `on_completion`."""
        self._inbox.put(lambda engine: engine.submit(request))

    def cancel(self, job_id: str) -> None:
        """Stop a request at the next step; it completes with what it has."""
        self._inbox.put(lambda engine: engine.cancel(job_id))

    def abandon(self) -> None:
        """Drop all work, without completions. Returns when that is done, or when the engine seems to hang."""
        done = threading.Event()

        def drop(engine: Engine) -> None:
            engine.abandon()
            done.set()

        self._inbox.put(drop)
        give_up_at = time.monotonic() + _HANG_SECONDS
        while self._thread.is_alive() and not done.wait(0.05):
            if time.monotonic() > give_up_at:
                log.error("the engine does not answer; its jobs are handed back all the same")
                return

    def stop(self) -> None:
        """End the thread and close the runner; unfinished work is dropped."""

        def end(engine: Engine) -> None:
            self._stopping = True

        self._inbox.put(end)
        if self._thread.is_alive():
            self._thread.join(_HANG_SECONDS)

    @property
    def alive(self) -> bool:
        """False once the thread has failed or was stopped."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._built.resolve(self._build)
        except BaseException:  # noqa: BLE001 - raised again by start(), in the thread that waits there
            return
        engine = self._built.wait()
        try:
            while not self._stopping:
                self._take_commands(engine)
                for completion in engine.step() if engine.has_work else ():
                    self._on_completion(completion)
        except Exception as error:
            log.critical("the engine failed: %s", error, exc_info=True)
            self._on_failure(error)
        finally:
            engine.close()

    def _take_commands(self, engine: Engine) -> None:
        """Carry out what others asked for; sleep only where there is nothing to generate."""
        try:
            self._inbox.get(block=not engine.has_work)(engine)
            while True:
                self._inbox.get_nowait()(engine)
        except Empty:
            return
