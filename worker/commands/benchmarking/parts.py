"""Parts of a benchmark, each in a process of its own: one that hangs or dies is cut, and the others go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.silence import Silence
from nightmill.worker.commands.benchmarking.report import EqualTexts, PartReport

__all__ = ["COMMAND", "News", "Part", "PartProcess", "PartTask"]

COMMAND = (sys.executable, "-m", "nightmill.worker.commands.benchmarking.process")
"""Computes a part; the last argument is the number of the inherited socket."""
_LOOK_SECONDS = 0.2
_DYING_SECONDS = 5.0
_ENDS = "runs to the end"


class Part(Enum):
    """A kind of part, with seconds after which it is cut, with a GPU and with NumPy."""

    KERNELS = (600.0, 600.0)
    NUMPY = (240.0, 240.0)
    FORMAT = (300.0, 3600.0)

    def most_seconds(self, *, gpu: bool) -> float:
        """Seconds after which it is cut."""
        return self.value[0 if gpu else 1]


@dataclass(frozen=True, slots=True)
class PartTask:
    """A part to compute.

    name        of the report, if the process cannot write one
    weights     the formats; a part of one format has one
    loads, seconds, altogether  what is timed, each for so long and all of them for so long
    """

    part: Part
    name: str
    settings: Settings
    weights: tuple[str, ...]
    loads: tuple[EqualTexts, ...] = ()
    seconds: float = 0.0
    altogether: float = 0.0


@dataclass(frozen=True, slots=True)
class News:
    """Something goes on: what it is for people, how much of it is done, and silence after which it hangs."""

    words: str
    done: int = 0
    total: int | None = None
    patience: float = 300.0


class PartProcess:
    """The process of a part. It is ended with all that it has started."""

    def __init__(self, task: PartTask) -> None:
        ours, theirs = Pipe()
        self._task = task
        self._began = time.monotonic()
        self._last = News("starting")
        self._report = PartReport(task.name)
        try:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the command, which ends its parts
            )
        finally:
            theirs.close()
        self._connection: Connection = ours
        self._connection.send(task)

    def wait(self, said: Callable[[News], None], most: float) -> PartReport:
        """Wait for the end, or for so many seconds since the start; what was found until then counts.

        said  is told how it goes on
        """
        failure = self._failure(said, most)
        self.close()
        if failure is not None:
            self._report.failed(_ENDS, failure)
        self._report.took("altogether", time.monotonic() - self._began)
        return self._report

    def close(self) -> None:
        """End it, whatever it does; safe to call again."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the driver: nobody can end it
            self._process.wait(_DYING_SECONDS)
        self._connection.close()

    def _failure(self, said: Callable[[News], None], most: float) -> str | None:
        """Take what the process sends; None once it has sent its last report."""
        silence = Silence(self._last.patience, 10 * _LOOK_SECONDS)
        while not silence.too_long():
            if time.monotonic() - self._began > most:
                return f"it was cut after {most:.0f} s, while {self._last.words}"
            try:
                if not self._connection.poll(_LOOK_SECONDS):
                    continue
                message: News | PartReport | None = self._connection.recv()
            except (EOFError, OSError):
                return f"its process ended by itself ({self._how_it_ended()}) while {self._last.words}"
            if message is None:
                return None
            if isinstance(message, PartReport):
                self._report = message
            else:
                if message.patience != silence.limit:
                    silence = Silence(message.patience, 10 * _LOOK_SECONDS)
                self._last = message
                said(message)
            silence.broken()
        return f"it hung and was cut: no news for {silence.limit:.0f} s, while {self._last.words}"

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return "without a word"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
