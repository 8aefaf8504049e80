"""Processes that a test session has started, to be found and ended once it is over.

A process is of a session if the session's mark is in its environment, or if it works in a folder of the
session: Redis wipes its environment. That holds for daemons, too, which have left their parents. `Watch`
starts a small process that ends them all when its input does: a killed session leaves no servers either.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

MARK = "PYTEST_SESSION_OF_NIGHTMILL"
"""The variable that marks processes; not NIGHTMILL_..., which tests take out of environments."""
TEST = "PYTEST_CURRENT_TEST"
"""The variable by which pytest says which test runs; a process has that of its start."""
_GRACE_SECONDS = 5.0  # for what is ending just then
_POLL_SECONDS = 0.05


def scratch_prefix() -> str:
    """How the names of this session's scratch folders begin."""
    mark = os.environ.get(MARK)
    return f"nightmill-{mark}-" if mark else "nightmill-"


def processes_of(mark: str, folders: Iterable[Path] = ()) -> list[psutil.Process]:
    """The processes of the session `mark`, or that work below `folders`; not the caller and its watch."""
    paths = [f"{folder}/" for folder in folders]
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.Error, OSError):
            cwd = process.cwd().removesuffix(" (deleted)") + "/"
            if process.status() == psutil.STATUS_ZOMBIE or _is_watch(process):
                continue
            if (
                process.environ().get(MARK) == mark
                or f"/nightmill-{mark}-" in cwd
                or any(cwd.startswith(path) for path in paths)
            ):
                found.append(process)
    return found


def left_behind(mark: str, folders: Iterable[Path], grace: float = _GRACE_SECONDS) -> list[psutil.Process]:
    """The processes of a session that are there yet `grace` seconds after its end."""
    folders = list(folders)
    give_up_at = time.monotonic() + grace
    while (found := processes_of(mark, folders)) and time.monotonic() < give_up_at:
        time.sleep(_POLL_SECONDS)
    return found


def described(processes: Iterable[psutil.Process]) -> list[str]:
    """A line for each process: what it is, where it works, and which test started it, if it says so."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            command = " ".join(word for word in process.cmdline() if word)[:120]
            test = process.environ().get(TEST)
            started = "" if test is None else f", started by {test}"
            lines.append(f"process {process.pid}, {command}, in {process.cwd()}{started}")
    return lines


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill them, and wait until they are gone."""
    processes = list(processes)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE_SECONDS)


class Watch:
    """Marks the processes of this session from now on, and has them ended if the session is killed."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex[:8]
        self.folders: list[Path] = []
        os.environ[MARK] = self.mark
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), self.mark],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal for the session's group is not for its watch
        )

    def add(self, folder: Path) -> None:
        """Have processes that work below `folder` count as the session's."""
        self.folders.append(folder)
        assert self._process.stdin is not None, "it was made with a pipe"
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()

    def left_behind(self) -> list[psutil.Process]:
        """What the session has left running; ask at its end."""
        return left_behind(self.mark, self.folders)

    def close(self) -> None:
        """End the watch."""
        os.environ.pop(MARK, None)
        self._process.kill()
        self._process.communicate()


def _is_watch(process: psutil.Process) -> bool:
    return __file__ in process.cmdline()


def _folders_until_the_end() -> Iterator[Path]:
    for line in sys.stdin:
        yield Path(line.rstrip("\n"))


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    folders = list(_folders_until_the_end())  # the session ends its watch; if it could not, it was killed
    mark = sys.argv[1]
    for _ in range(20):  # what is being started just then comes to light later
        end(processes_of(mark, folders))
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    _main()
