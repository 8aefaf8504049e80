"""Starts the engine's process, with a link to it."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nightmill.jobs.base.settings import Settings
from nightmill.worker.link.link import EngineLink
from nightmill.worker.link.messages import Begin

log = logging.getLogger(__name__)

ENGINE_COMMAND = (
    sys.executable,
    "-P",  # not from the working folder
    "-m",
    "nightmill.worker.link.process",
)
_KILL_SECONDS = 10.0  # in which a killed process ends, unless it is stuck in the system


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


def launch_engine(
    settings: Settings,
    command: Sequence[str] | None = None,
    *,
    hang_seconds: float,
    ledger: int | None = None,
) -> EngineLink:
    """Start the engine's process, which begins to load the model at once.

    It ends when the pipe does, however this process ends. `ledger` is a descriptor of the accounts of engines
    that share its GPU.
    """

    def begun(*, plain_products: bool) -> tuple[Connection, _Process]:
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
        ours.send(Begin(settings, logging.getLogger().getEffectiveLevel(), plain_products, ledger))
        return ours, _Process(process)

    may_be_packed = settings.weights in ("auto", "file") and not settings.reference
    connection, host = begun(plain_products=False)
    return EngineLink(
        connection,
        host,
        hang_seconds=hang_seconds,
        about=_about(settings),
        again=(lambda: begun(plain_products=True)) if may_be_packed else None,
    )


def _about(settings: Settings) -> str:
    """Name the model, weights and GPU of an engine, for messages."""
    gpu = "the first GPU" if settings.gpu is None else f"GPU {settings.gpu}"
    if settings.reference:
        gpu = "NumPy"
    return f"model {settings.model}, weights {settings.weights}, {gpu}"
