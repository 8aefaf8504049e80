"""A worker as a child process: started on a client's settings, drained when it is no longer wanted.

It ends with the process that started it, whatever becomes of that one: its standard input is a pipe that
nobody writes to, and that closes when the other end does. See `end_with_stdin`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.client import Client
from jobs.errors import NightmillError
from jobs.settings import PREFIX
from jobs.terminal import Line, LiveLine

# -P: a folder that a person works in may have a `jobs/` or a `queue.py` of its own.
WORKER_COMMAND = (sys.executable, "-P", "-m", "jobs", "worker")
END_WITH_STDIN = "--end-with-stdin"
_START_SECONDS = 120.0


def end_with_stdin() -> None:
    """Drain this worker, as at SIGTERM, once its standard input ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class WorkerProcess:
    """One worker process. `pass_fds` are files that it holds open for as long as it lives."""

    def __init__(
        self,
        client: Client,
        log: Path,
        arguments: Sequence[str] = (),
        command: Sequence[str] = WORKER_COMMAND,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        self._client = client
        self._known = {row["id"] for row in client.store.workers()}
        self._give_up_at = time.monotonic() + _START_SECONDS
        self._ready = False
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        for name, value in client.settings.model_dump(mode="json", exclude_defaults=True).items():
            environment[PREFIX + name.upper()] = str(value)
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [*command, END_WITH_STDIN, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the process that started it to handle
                pass_fds=tuple(pass_fds),
            )

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative: the signal that killed it; None while it runs."""
        return self.popen.poll()

    @property
    def ready(self) -> bool:
        """True once it takes jobs. Raises NightmillError with the end of its log where it does not start."""
        if not self._ready:
            self._ready = any(row["state"] == "ready" for row in self.rows())
        if not self._ready and (self.exit_code is not None or time.monotonic() > self._give_up_at):
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise NightmillError(f"the worker did not start; the end of {self.log}:\n{last}")
        return self._ready

    def rows(self) -> list[dict[str, Any]]:
        """Its row in `workers`, once it has registered."""
        return [
            row
            for row in self._client.store.workers()
            if row["id"] not in self._known and row["pid"] == self.popen.pid
        ]

    def wait_until_ready(self) -> None:
        """Return when it takes jobs; raises NightmillError where it does not start."""
        while not self.ready:
            time.sleep(0.05)

    def drain(self) -> None:
        """Let it finish what it can in its drain time, and hand back the rest."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let it hand everything back at once."""
        self._signal(signal.SIGQUIT)

    def close(self) -> None:
        """Drain it and wait for its end."""
        self.drain()
        self.popen.wait()
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

    Raises NightmillError with the end of its log where it does not become ready.
    """
    worker = WorkerProcess(client, log, arguments, command)
    try:
        with LiveLine(Line(name="loading the model ..."), estimate=True):
            worker.wait_until_ready()
        yield worker.popen
    finally:
        worker.close()
