"""Starts the engine's process, with a link to it.

To import what a worker or an engine needs takes a second or two of a processor each. So the process is
started ahead of the worker (`EngineAhead`), while that imports Celery; and a worker that swaps its model
hands the next engine's process on to the program that it becomes.
"""

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol, Self

from nightmill.jobs.base.settings import Settings
from nightmill.worker.link.link import EngineLink
from nightmill.worker.link.messages import Begin, Go

log = logging.getLogger(__name__)

ENGINE_COMMAND = (
    sys.executable,
    "-P",  # not from the working folder
    "-m",
    "nightmill.worker.link.process",
)
_KILL_SECONDS = 10.0  # in which a killed process ends, unless it is stuck in the system
_POLL_SECONDS = 0.02
_BEGUN = "begun"


class _Child(Protocol):
    """A child process, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Return None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """Force its end."""
        ...


class _Inherited:
    """A child that this process has had since it was another program (`os.execv`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._looking = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        with self._looking:
            return self._look()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise subprocess.TimeoutExpired(ENGINE_COMMAND, 0.0 if timeout is None else timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Force its end."""
        with self._looking:
            if self._look() is None:  # then its id is not another's
                os.kill(self.pid, signal.SIGKILL)

    def _look(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it has ended, and somebody has asked how
                self._code = 1
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class _Process:
    """A child process as a host."""

    def __init__(self, process: _Child) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; a process that does not come to it in time is killed."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            if timeout is None or timeout > 0.0:
                log.error("the engine's process does not end; it is killed")
            self.kill()
            try:
                self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("the engine's process is stuck in the system and cannot be killed")

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()


class EngineAhead:
    """An engine's process that does not know yet what to serve, or has just been told.

    It is killed with the thread that started it, so that has to be the main thread of a process, and ends
    when its pipe does. Until it is told what to serve, it takes nothing of a GPU.
    """

    def __init__(self, connection: Connection, host: _Process, *, begun: bool = False) -> None:
        self.connection = connection
        self.host = host
        self.begun = begun
        """It has been told what to serve."""

    @classmethod
    def start(cls, command: Sequence[str] | None = None, ledger: int | None = None) -> Self:
        """Start the process; `ledger` is a descriptor of the accounts of engines that share its GPU."""
        ours, theirs = Pipe()
        try:
            process = subprocess.Popen(
                [*(command or ENGINE_COMMAND), str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *(() if ledger is None else (ledger,))],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is the worker's to handle
            )
        finally:
            theirs.close()
        return cls(ours, _Process(process))

    def begin(
        self, settings: Settings, *, log_level: int | None = None, plain_products: bool = False,
        ledger: int | None = None, waits: bool = False,
    ) -> None:  # fmt: skip
        """Tell it what to serve, which it begins to load at once. A process that has ended is found later.

        log_level  how much it logs; by default as much as this process
        waits      it leaves the GPU alone until `go`
        """
        level = logging.getLogger().getEffectiveLevel() if log_level is None else log_level
        self.begun = True
        self._tell(Begin(settings, level, plain_products, ledger, waits))

    def go(self) -> None:
        """Let it use the GPU, for which it waits."""
        self._tell(Go())

    def _tell(self, command: Begin | Go) -> None:
        try:
            self.connection.send(command)
        except OSError as error:
            log.debug("the engine's process was not told what to do: %s", error)

    def hand_on(self) -> str:
        """Let go of it for who has what this returns: `inherit`, in the program that this process becomes."""
        number = os.dup(self.connection.fileno())
        self.connection.close()
        os.set_inheritable(number, True)
        return f"{self.host.pid}:{number}" + (f":{_BEGUN}" if self.begun else "")

    @classmethod
    def inherit(cls, text: str) -> Self | None:
        """Take over what the program that this process was has handed on; None if it is not there."""
        try:
            pid, number, *rest = text.split(":")
            descriptor = int(number)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return None
            os.set_inheritable(descriptor, False)
            return cls(Connection(descriptor), _Process(_Inherited(int(pid))), begun=rest == [_BEGUN])
        except (OSError, ValueError) as error:
            log.warning("an engine that was started ahead is not there (%s): another is started", error)
            return None


def launch_engine(
    settings: Settings,
    command: Sequence[str] | None = None,
    *,
    hang_seconds: Callable[[], float],
    ledger: int | None = None,
    ahead: EngineAhead | None = None,
) -> EngineLink:
    """Start the engine's process, which begins to load the model at once.

    It ends when the pipe does, however this process ends.

    hang_seconds  is asked once the process is started, as it may have to count GPUs
    ledger        a descriptor of the accounts of engines that share its GPU
    ahead         a process that was started ahead, which is taken
    """

    def again() -> tuple[Connection, _Process]:
        another = EngineAhead.start(command, ledger)
        another.begin(settings, plain_products=True, ledger=ledger)
        return another.connection, another.host

    taken = EngineAhead.start(command, ledger) if ahead is None else ahead
    if not taken.begun:
        taken.begin(settings, ledger=ledger)
    may_be_packed = settings.weights in ("auto", "file") and not settings.reference
    return EngineLink(
        taken.connection,
        taken.host,
        hang_seconds=hang_seconds(),
        about=_about(settings),
        again=again if may_be_packed else None,
    )


def _about(settings: Settings) -> str:
    """Name the model, weights and GPU of an engine, for messages."""
    gpu = "the first GPU" if settings.gpu is None else f"GPU {settings.gpu}"
    if settings.reference:
        gpu = "NumPy"
    return f"model {settings.model}, weights {settings.weights}, {gpu}"
