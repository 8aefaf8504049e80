"""Processes for what strangers have written: without secrets, killed at any moment, asked why they died.

What such a process runs is a script of ours that imports nothing of the package. How it bounds its own memory
and time is its own matter; who starts it talks to it over a channel of its own choice.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from nightmill.jobs.errors import RunnerError

__all__ = ["TRIES", "ConfinedProcess", "LostError", "Words"]

TRIES: Final = 2
"""For what ends without an answer, and nothing says that it was to blame; and for starting a process."""
_PAUSE: Final = 0.2  # seconds before a process that could not be started is tried again
_DYING: Final = 5.0  # seconds that a process may take to end once its end of the channel is closed
# Anybody may kill a process (the kernel, if memory is short); these a process brings upon itself.
_CRASHES: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class LostError(Exception):
    """The process has died, or does not answer; `convicts`: it was what it computed that ended it."""

    def __init__(self, reason: str, *, convicts: bool = False) -> None:
        super().__init__(reason)
        self.convicts = convicts


@dataclass(frozen=True, slots=True)
class Words:
    """The wording of errors about a confined process.

    process  what it is called
    slow     said if its processor time is used up, which it lets the kernel end it for (SIGPROF)
    crashed  said if it ended itself, by the signal `{signal}`
    """

    process: str
    slow: str
    crashed: str


class ConfinedProcess:
    """One process: a session of its own, no environment but what it is given, no standard error."""

    def __init__(
        self,
        program: Path,
        libraries: Iterable[ModuleType],
        words: Words,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `program arguments... folders`; raises RunnerError if that fails, which is no job's fault.

        libraries  what it may import besides Python's own: their folders are given to it
        stdin, stdout, pass_fds  as for Popen
        """
        self._words = words
        folders = sorted({str(Path(str(module.__file__)).parents[1]) for module in libraries})
        command = [sys.executable, "-I", "-S", str(program), *arguments, *folders]
        for left in reversed(range(TRIES)):
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL,
                    pass_fds=tuple(pass_fds),
                    env=dict(environment or {}),
                    cwd="/",
                    start_new_session=True,
                )
                break
            except OSError as error:  # no memory, or too many processes
                if not left:
                    raise self.not_started(words, error) from error
                time.sleep(_PAUSE)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @staticmethod
    def not_started(words: Words, error: OSError) -> RunnerError:
        """Also for who cannot make the channel."""
        return RunnerError(f"{words.process} cannot be started: {error}")

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in the system; nobody needs its end
            self._process.wait(_DYING)

    def lost(self) -> LostError:
        """Why it ended, which it did, or is about to."""
        words = self._words
        try:
            code = self._process.wait(timeout=_DYING)
        except subprocess.TimeoutExpired:
            return LostError(f"{words.process} hung up")
        if code == -signal.SIGPROF:
            return LostError(words.slow, convicts=True)
        if -code in _CRASHES:
            return LostError(words.crashed.format(signal=signal.Signals(-code).name), convicts=True)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LostError(f"{words.process} was ended ({how})", convicts=code >= 0)
