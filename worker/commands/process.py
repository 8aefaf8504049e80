"""A worker as a child process: started on a client's settings, drained when it is no longer wanted.

It ends with the process that started it, whatever becomes of that one: its standard input is a pipe that
nobody writes to, and that closes when the other end does (`worker.service.parent`).
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nightmill.jobs.base.last_resort import END_SECONDS
from nightmill.jobs.base.settings import PREFIX, Settings
from nightmill.jobs.base.silence import Silence
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.terminal import LiveLine, ProgressLine
from nightmill.jobs.errors import NightmillError
from nightmill.worker.service.heart import LOADING
from nightmill.worker.service.parent import END_WITH_STDIN

# -P: a folder that a person works in may have a `jobs/` or a `queue.py` of its own.
WORKER_COMMAND = (sys.executable, "-P", "-m", "nightmill", "worker")
_FOR_SERVICE = frozenset(
    {"hours", "idle_seconds", "models", "stay", "swap_for_interactive", "together"}
)  # whoever starts a run by hand does not wait for the night
_KILL_SECONDS = 10.0  # beyond what a worker may take to end
_SLOW_START_SECONDS = 1000.0  # without progress; the worker itself gives up a little earlier


def end_seconds(settings: Settings) -> float:
    """Seconds that a worker may take to end once it was told to, before it is killed."""
    return settings.drain_seconds + END_SECONDS + _KILL_SECONDS


class WorkerProcess:
    """One worker process. `pass_fds` are files that it holds open for as long as it lives.

    It is known by its row in `workers`, whose id is given to it: a process id says nothing across hosts.
    """

    def __init__(
        self,
        client: Client,
        log: Path,
        arguments: Sequence[str] = (),
        command: Sequence[str] = WORKER_COMMAND,
        *,
        worker_id: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        self._client = client
        self.id = uuid.uuid4().hex if worker_id is None else worker_id
        self._progress = ""
        self._silence = Silence(_SLOW_START_SECONDS, 5.0)
        self._served = False
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        for name, value in client.settings.model_dump(mode="json", exclude_defaults=True).items():
            if name not in _FOR_SERVICE:
                environment[PREFIX + name.upper()] = str(value)
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [*command, END_WITH_STDIN, "--id", self.id, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the process that started it to handle
                pass_fds=tuple(pass_fds),
            )

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code; negative: the signal that killed it; None while it runs."""
        return self.popen.poll()

    @property
    def served(self) -> bool:
        """True once it has taken jobs, even if it has died since."""
        self._look()
        return self._served

    @property
    def ready(self) -> bool:
        """True once the worker has taken jobs, even if it has died since.

        Raises NightmillError with the end of its log if it does not come to that.
        """
        code = self.exit_code  # before its row is read: it may die in between
        if self.served:
            return True
        if code is not None or self._silence.too_long():
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise NightmillError(f"the worker did not start; the end of {self.log}:\n{last}")
        return False

    @property
    def progress(self) -> str:
        """The step that the worker is at before it is ready, for people."""
        return self._progress or LOADING

    def _look(self) -> None:
        """Read its row, once it has one."""
        if self._served:
            return
        worker = self._client.worker_store.get(self.id)
        if worker is None:
            return
        self._served = worker.has_served
        if worker.detail != self._progress:
            self._progress = worker.detail or ""
            self._silence.broken()

    def wait_until_ready(self, tell: Callable[[str], object] = lambda progress: None) -> None:
        """Return when it takes jobs; raises NightmillError if it does not start."""
        while not self.ready:
            tell(self.progress)
            time.sleep(0.05)

    def drain(self) -> None:
        """Let it finish what it can in its drain time, and hand back the rest."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let it hand everything back at once."""
        self._signal(signal.SIGQUIT)

    def close(self) -> None:
        """Drain it and wait for its end; one that does not come to it in time is killed."""
        self.drain()
        try:
            self.popen.wait(end_seconds(self._client.settings))
        except subprocess.TimeoutExpired:  # it is suspended, say: it cannot even end itself by force
            self.popen.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the system: the kernel ends it some day
                self.popen.wait(_KILL_SECONDS)
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)


@contextmanager
def running_worker(
    client: Client, log: Path, arguments: Sequence[str] = (), command: Sequence[str] = WORKER_COMMAND
) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker process on the client's settings, ready to take jobs; drained and ended on exit.

    Raises NightmillError with the end of its log if it does not become ready.
    """
    worker = WorkerProcess(client, log, arguments, command)
    try:
        with LiveLine(ProgressLine(name=f"{LOADING} ..."), estimate=True) as line:
            worker.wait_until_ready(lambda progress: line.update(ProgressLine(name=f"{progress} ...")))
        yield worker.popen
    finally:
        worker.close()
