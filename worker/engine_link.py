"""The worker's end of the pipe to its engine: hands over requests, hands out completions."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Protocol

from jobs.errors import RunnerError
from jobs.settings import Settings
from worker.engine.engine import EngineStats
from worker.engine.request import Completion, Progress, Request
from worker.engine_messages import (
    Abandon,
    Answer,
    Ask,
    Begin,
    Cancel,
    Command,
    Completed,
    Failed,
    Ready,
    Stop,
    Submit,
    Told,
)

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "worker.engine_process")  # -P: not from the working folder
_HANG_SECONDS = 30.0  # far beyond any step; after this a step is taken to be stuck for good


class Host(Protocol):
    """What runs the other end: a process, or in tests a thread."""

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, and force it after `timeout` seconds where that can be done."""
        ...


class EngineLink:
    """An engine elsewhere. `start` once; then every method may be called from any thread."""

    def __init__(self, connection: Connection, host: Host) -> None:
        self._connection = connection
        self._host = host
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._question = 0  # the number of the last one
        self._answers: SimpleQueue[Told] = SimpleQueue()
        self._over = False  # it failed or was stopped
        self._stats: EngineStats | None = None
        self.arithmetic = ""
        """Of the engine's runner, once it has started."""
        self._receiver = threading.Thread(target=self._receive, name="engine link", daemon=True)

    def start(
        self, on_completion: Callable[[Completion], None], on_failure: Callable[[RunnerError], None]
    ) -> None:
        """Wait until the engine is built. Raises RunnerError with the reason where it cannot be.

        The two are called on a thread of the link's own and must be quick. After `on_failure` nothing more
        is completed.
        """
        self._on_completion, self._on_failure = on_completion, on_failure
        try:
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            answer = Failed("the engine's process ended before it was ready; its output tells more")
        if not isinstance(answer, Ready):
            self.stop()
            raise RunnerError(answer.reason if isinstance(answer, Failed) else f"unexpected: {answer}")
        self._stats = answer.stats
        self.arithmetic = answer.arithmetic
        self._receiver.start()

    @property
    def stats(self) -> EngineStats:
        """The engine's counters as of its last report, at most half a second old while it works."""
        assert self._stats is not None, "the link was not started"
        return self._stats

    @property
    def alive(self) -> bool:
        """False once the engine has failed or was stopped."""
        return not self._over and self._host.is_alive()

    def submit(self, request: Request) -> None:
        """Queue a request; its completion arrives through `on_completion`."""
        self._send(Submit(request))

    def cancel(self, job_id: str) -> None:
        """Stop a request at the next step; it completes with what it has."""
        self._send(Cancel(job_id))

    def abandon(self) -> list[Progress]:
        """Drop all work, without completions; returns the tokens that each request had."""
        return self._ask(Abandon)

    def progress(self, job_ids: list[str], at_least: int) -> list[Progress]:
        """The tokens of those of these jobs that have `at_least` so many more than when last asked."""
        return self._ask(lambda number: Ask(number, job_ids, at_least))

    def stop(self) -> None:
        """End the engine and close its runner; unfinished work is dropped. Safe to call twice."""
        self._over = True
        self._send(Stop(), patience=_HANG_SECONDS)
        self._host.join(0.0 if self._stats is None else _HANG_SECONDS)  # one that still loads reads nothing
        if self._receiver.is_alive():
            self._receiver.join()
        with self._sending:  # nobody is in the middle of a command: the other end is gone
            self._connection.close()

    def _send(self, command: Command, patience: float = -1) -> None:
        """Hand a command over; gives up after `patience` seconds (negative: never).

        Another thread may be stuck in the middle of its command, where the pipe is full and the engine hangs.
        """
        if not self._sending.acquire(timeout=patience):
            log.error("the engine has taken no command for %.0f s: a step seems to hang", patience)
            return
        try:
            self._connection.send(command)
        except OSError:  # nobody is there any more: the receiver sees it, too, and reports it
            log.debug("%s was not delivered", type(command).__name__)
        finally:
            self._sending.release()

    def _ask(self, question: Callable[[int], Command]) -> list[Progress]:
        """Have the engine answer between two steps; nothing where it has failed or seems to hang."""
        with self._asking:
            self._question += 1
            self._send(question(self._question), patience=_HANG_SECONDS)
            give_up_at = time.monotonic() + _HANG_SECONDS
            while self.alive:
                try:
                    told = self._answers.get(timeout=0.05)
                except Empty:
                    if time.monotonic() > give_up_at:
                        log.error(
                            "the engine has not answered for %.0f s: a step seems to hang", _HANG_SECONDS
                        )
                        break
                    continue
                if told.number == self._question:  # else it answers a question that was given up
                    return told.progress
        return []

    def _receive(self) -> None:
        try:
            while not isinstance(answer := self._connection.recv(), Failed):
                self._take(answer)
            reason = answer.reason
        except (EOFError, OSError):
            reason = "its process ended without a word (killed, perhaps for want of memory)"
        if not self._over:
            self._over = True
            self._on_failure(RunnerError(reason))

    def _take(self, answer: Answer) -> None:
        match answer:
            case Completed(completions, stats):
                self._stats = stats
                for completion in completions:
                    self._on_completion(completion)
            case Told():
                self._stats = answer.stats
                self._answers.put(answer)


class _Process:
    """A child process as a host."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; a process that does not come to it in time is killed."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            if timeout:
                log.error("the engine's process does not end; it is killed")
            self._process.kill()
            self._process.wait()


def launch_engine(settings: Settings, command: Sequence[str] | None = None) -> EngineLink:
    """Start the engine's process, which begins to load the model at once.

    It ends when the pipe does, however this process ends.
    """
    ours, theirs = Pipe()
    try:
        process = subprocess.Popen(
            [*(command or ENGINE_COMMAND), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is the worker's to handle
        )
    finally:
        theirs.close()
    ours.send(Begin(settings, logging.getLogger().getEffectiveLevel()))
    return EngineLink(ours, _Process(process))
