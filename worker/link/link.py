"""The worker's end of the pipe to its engine: hands over requests, hands out completions, and watches.

An engine that neither answers nor ends is worse than a dead one: it keeps its jobs. So it is asked for a
sign of life every few seconds, which it gives between two steps; where it gives none for too long, it is
killed and reported as failed.
"""

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Protocol

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.silence import Silence
from nightmill.jobs.errors import RunnerError
from nightmill.worker.engine.request import Completion, Delta, DrawnTokens, Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.link.messages import (
    Abandon,
    Answer,
    Answered,
    Ask,
    Cancel,
    Command,
    Completed,
    Deltas,
    Failed,
    Follow,
    Ready,
    Stop,
    Submit,
)
from nightmill.worker.link.startup import first_answer
from nightmill.worker.watched import watched_thread

log = logging.getLogger(__name__)

_PING_SECONDS = 5.0  # at least so often it is asked for a sign of life
_PATIENCE_SECONDS = 10.0  # for an answer that somebody waits for
_LESS_PATIENCE_SECONDS = 1.0  # where the one before has waited in vain
_PING = 0  # the number of a question that nobody waits for


class Host(Protocol):
    """The process that runs the other end of a link, or in tests a thread."""

    def is_alive(self) -> bool:
        """True while the host runs."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, and force it after `timeout` seconds where that can be done."""
        ...

    def kill(self) -> None:
        """Force its end where that can be done, without waiting for it."""
        ...


def _ignore(news: str | None) -> None:
    """For those whom it does not concern how far an engine is loaded."""


def _ignore_deltas(deltas: list[Delta]) -> None:
    """For those who follow no job."""


class EngineLink:
    """An engine elsewhere. `start` once; then every method may be called from any thread.

    hang_seconds  silence after which it counts as hung, once it is built
    about         model, weights and GPU, for messages
    again         starts another engine, with plain products, if kernels fail while this one starts
    """

    def __init__(
        self, connection: Connection, host: Host, *, hang_seconds: float, about: str = "",
        again: Callable[[], tuple[Connection, Host]] | None = None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._host = host
        self._about = about
        self._again = again
        self._note = ""
        self._hang_seconds = hang_seconds
        self._patience = min(_PATIENCE_SECONDS, hang_seconds)
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._question = 0  # the number of the last one
        self._answers: SimpleQueue[Answered] = SimpleQueue()
        self._over = False  # it failed or was stopped
        self._stopping = self._asked = False  # it is to end, and was told so
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._heard = 0  # answers so far
        self._unanswered = False  # somebody has waited for an answer in vain
        self._stats: EngineStats | None = None
        self._arithmetic: Arithmetic | None = None
        self._threads = [
            watched_thread("engine link", self._receive, self._fail),
            watched_thread("engine watch", self._watch, self._fail),
        ]

    def start(
        self,
        on_completion: Callable[[Completion], None],
        on_failure: Callable[[RunnerError], None],
        while_loading: Callable[[str | None], None] = _ignore,
        on_deltas: Callable[[list[Delta]], None] = _ignore_deltas,
    ) -> None:
        """Wait until the engine is built. Raises RunnerError with the reason where it cannot be.

        `while_loading` is called a few times a second, with what the engine says about how far it is, or
        None; what it raises ends the waiting. The others are called on threads of the link's own and must
        be quick; after `on_failure` nothing more is completed.
        """
        self._on_completion, self._on_failure = on_completion, on_failure
        self._on_deltas = on_deltas
        answer = first_answer(self._connection, while_loading, self._about)
        if isinstance(answer, Failed) and answer.by_products and self._start_again(answer.reason):
            first, answer = answer, first_answer(self._connection, while_loading, self._about)
            if isinstance(answer, Failed):
                answer = Failed(f"{answer.reason}; with the usual products, before: {first.reason}")
        if not isinstance(answer, Ready):
            self.stop()
            raise RunnerError(answer.reason if isinstance(answer, Failed) else f"unexpected: {answer}")
        self._stats = answer.stats
        self._arithmetic = answer.arithmetic
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> EngineStats:
        """The engine's counters as of its last report, at most half a second old while it works."""
        assert self._stats is not None, "the link was not started"
        return self._stats

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the engine's runner."""
        assert self._arithmetic is not None, "the link was not started"
        return self._arithmetic

    @property
    def hang_seconds(self) -> float:
        """Silence after which the engine counts as hung, and is killed."""
        return self._hang_seconds

    @property
    def note(self) -> str:
        """A note for people on how the engine runs; "" if it runs as usual."""
        return self._note

    @property
    def alive(self) -> bool:
        """False once the engine has failed or was stopped."""
        return not self._over and self._host.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; their completions arrive through `on_completion`.

        Many at once: whoever writes to the pipe lets go of the interpreter, and has to wait for it again.
        """
        self._send(Submit(list(requests)))

    def cancel(self, job_id: str) -> bool:
        """Stop a request at the next step; it completes with what it has. False where it was not told."""
        return self._send(Cancel(job_id), patience=self._patience)

    def abandon(self, patience: float | None = None) -> list[DrawnTokens] | None:
        """Drop all work, without completions; returns the tokens that each request had.

        None if it has failed, or not answered within `patience` seconds: then it may drop its work later.
        """
        return self._ask(Abandon, patience)

    def follow(self, job_ids: Sequence[str]) -> bool:
        """Have `on_deltas` told the texts of these jobs, and of no others. False where it was not told.

        What a text has grown by comes before its completion.
        """
        return self._send(Follow(list(job_ids)), patience=self._patience)

    def progress(self, job_ids: list[str], at_least: int) -> list[DrawnTokens]:
        """The tokens of those of these jobs that have `at_least` so many more than when last asked.

        None of them where it has failed, or does not answer in time: the next call asks again.
        """
        return self._ask(lambda number: Ask(number, job_ids, at_least)) or []

    def begin_stop(self) -> None:
        """Have the engine end and close its runner, without waiting for it; unfinished work is dropped."""
        with self._ending:
            if self._stopping:
                return
            self._over = self._stopping = True
        self._ended.set()
        loaded = self._stats is not None  # one that still loads reads nothing
        self._asked = loaded and not self._unanswered and self._send(Stop(), patience=self._patience)

    def stop(self) -> None:
        """The same, and wait for its end. Safe to call twice.

        One that does not answer any more is killed.
        """
        self.begin_stop()
        self._host.join(self._patience if self._asked else 0.0)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._patience)
        with self._sending:  # nobody is in the middle of a command: the other end is gone
            self._connection.close()

    def kill(self) -> None:
        """End the engine's process at once, without waiting for it."""
        self._host.kill()

    def _send(self, command: Command, patience: float | None = None) -> bool:
        """Hand a command over; gives up after `patience` seconds (None: never). False where it was not sent.

        Where the pipe is full and the engine hangs, this thread or another would be stuck in the middle of a
        command. A small command always fits into a pipe that can be written to.
        """
        give_up_at = time.monotonic() + (0.0 if patience is None else patience)
        if not self._sending.acquire(timeout=-1 if patience is None else patience):
            return False
        try:
            if patience is not None and not self._writable(give_up_at - time.monotonic()):
                return False
            self._connection.send(command)
        except OSError:  # nobody is there any more: the receiver sees it, too, and reports it
            log.debug("%s was not delivered", type(command).__name__)
            return False
        finally:
            self._sending.release()
        return True

    def _writable(self, patience: float) -> bool:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLOUT)
        return bool(poll.poll(max(0.0, patience) * 1000))

    def _ask(
        self, question: Callable[[int], Command], patience: float | None = None
    ) -> list[DrawnTokens] | None:
        """Have the engine answer between two steps; None where it has failed or takes too long."""
        with self._asking:
            self._question += 1
            if patience is None:
                patience = min(self._patience, _LESS_PATIENCE_SECONDS) if self._unanswered else self._patience
            give_up_at = time.monotonic() + patience
            asked = self._send(question(self._question), patience=patience)
            while asked and self.alive and time.monotonic() < give_up_at:
                try:
                    told = self._answers.get(timeout=0.05)
                except Empty:
                    continue
                if told.number == self._question:  # else it answers a question that was given up
                    return told.progress
            if self.alive and not self._unanswered:
                self._unanswered = True
                log.warning("the engine has not answered for %.0f s", patience)
        return None

    def _start_again(self, reason: str) -> bool:
        """Put an engine with plain products in the place of one whose kernels failed, if there is such a way.

        A kernel that traps or hangs leaves a CUDA context that is of no use: only another process helps.
        """
        if self._again is None:
            return False
        self._host.join(0.0)
        with self._ending:
            if self._over:
                return False
            self._connection.close()
            self._connection, self._host = self._again()
        log.error("%s: the engine is started once more, with plain products, which are slower", reason)
        self._note = f"plain products, slower than usual: {reason}"
        return True

    def _receive(self) -> None:
        try:
            while not isinstance(answer := self._connection.recv(), Failed):
                self._heard += 1
                self._unanswered = False
                self._take(answer)
            reason = answer.reason
        except (EOFError, OSError):
            reason = "its process ended without a word (killed, perhaps for want of memory)"
        self._fail(reason)

    def _watch(self) -> None:
        """Ask for a sign of life, and end an engine that gives none."""
        step = min(_PING_SECONDS, self._hang_seconds / 4)
        silence = Silence(self._hang_seconds, 2 * step)
        heard = -1
        while not self._ended.wait(step):
            if heard != self._heard:
                heard = self._heard
                silence.broken()
            elif silence.too_long():
                self._fail(f"it has not answered for {silence.limit:.0f} s: a step hangs", kill=True)
                return
            # Where this cannot be sent, the commands that fill the pipe are as good a question.
            self._send(Ask(_PING, [], 0), patience=0.0)

    def _fail(self, reason: str, *, kill: bool = False) -> None:
        with self._ending:
            if self._over:
                return
            self._over = True
        if kill:
            self._host.kill()
        self._on_failure(RunnerError(reason))

    def _take(self, answer: Answer) -> None:
        match answer:
            case Completed(completions, stats):
                self._stats = stats
                for completion in completions:
                    self._on_completion(completion)
            case Deltas(deltas):
                self._on_deltas(deltas)
            case Answered():
                self._stats = answer.stats
                if answer.number != _PING:
                    self._answers.put(answer)
