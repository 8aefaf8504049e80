"""Sees to it that a model is served: by a worker that is there, or by one of our own, restarted if it dies.

A lock file, held open by us and by our worker, says that one of them lives. Whoever gets the lock knows that
both of the earlier holders are gone, and can give their jobs back at once in place of waiting for silence.

Who asks for a device, `--gpu N` or `--reference`, gets a worker there: one that is elsewhere does not serve.
"""

import fcntl
import re
import signal
import socket
import uuid

from nightmill.jobs.base.settings import Settings, make_data_dir
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.assembly.options import gpu_name
from nightmill.worker.commands.process import WorkerProcess, end_seconds

_ID = re.compile("[0-9a-f]{32}")
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
# In a row, without a row done in between. A job that kills its worker is found among thousands, and failed,
# with fewer: so it is the model, the GPU or this machine.
_MOST_DEATHS = 20


def is_asked_for(worker: Worker, settings: Settings) -> bool:
    """True if a worker is on the device that the settings ask for."""
    if settings.reference:
        return worker.gpu is None
    here = worker.host == socket.gethostname()
    return settings.gpu is None or (here and worker.gpu == gpu_name(settings.gpu))


class WorkerKeeper:
    """Keeps a worker for `model` if no other serves it. Call `check` every second or so."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._sweep = Sweep(client.database)
        self._deaths = 0
        self._done_at_death = 0
        self.own: WorkerProcess | None = None
        home = client.settings.data_dir
        make_data_dir(home)
        name = re.sub(
            r"[^A-Za-z0-9._-]", "-", f"run-{client.settings.resolved_database_url.database}-{model}"
        )
        self.log = home / f"{name[-150:]}.log"
        self._lock = (home / f"{name[-150:]}.lock").open("a+")
        self._locked = False

    def check(self, done: int) -> str:
        """Do what is needed; returns what is being waited for, if anything. `done`: rows done so far.

        Raises NightmillError if our own worker does not start, or dies again and again.
        """
        if self.own is not None and self._died(self.own):
            self._bury_own(self.own, done)
        if self.own is not None:
            return "" if self.own.ready else self.own.progress
        if not self._take_lock():
            return "" if self.served else "waiting for the worker of an earlier run to end"
        self._bury_earlier()
        if self.served:
            self._release_lock()
            return ""
        worker_id = uuid.uuid4().hex
        self._write(worker_id)  # first, so that a worker that has claimed jobs is always written down
        self.own = WorkerProcess(self._client, self.log, worker_id=worker_id, pass_fds=[self._lock.fileno()])
        return self.own.progress

    @property
    def served(self) -> bool:
        """True if any worker serves the model, on the device that the settings ask for."""
        settings, workers = self._client.settings, self._client.worker_store
        in_turn = [worker for worker in workers.could_serve(self._model) if not worker.rests]
        return any(is_asked_for(worker, settings) for worker in (*workers.serving(self._model), *in_turn))

    def end(self, *, at_once: bool) -> str:
        """Let our own worker end, without waiting for it; returns what will happen."""
        if self.own is None:
            return "the rows stay queued, for the workers that serve the model"
        if at_once:
            self.own.stop()
            return "the worker hands its rows back to the queue"
        self.own.drain()
        seconds = self._client.settings.drain_seconds
        return f"the worker finishes what it can in {seconds:.0f} s and hands the rest back"

    @property
    def end_seconds(self) -> float:
        """Seconds that our own worker may take to end, whatever hangs."""
        return end_seconds(self._client.settings)

    @property
    def ended(self) -> bool:
        """True if no worker of our own is running."""
        return self.own is None or self.own.exit_code is not None

    def close(self) -> None:
        """Drain our own worker, if there is one, and wait for its end."""
        if self.own is not None:
            self.own.close()
        self._lock.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _died(self, worker: WorkerProcess) -> bool:
        """True if it has ended and may be started again; for one that fails to start, see its `ready`."""
        return worker.exit_code is not None and (worker.served or worker.exit_code in _KILLED)

    def _bury_own(self, worker: WorkerProcess, done: int) -> None:
        if done > self._done_at_death:
            self._deaths = 0
        self._deaths += 1
        self._done_at_death = done
        self._sweep.bury(worker.id, blame=True)
        worker.close()
        self.own = None
        self._write("")
        if self._deaths >= _MOST_DEATHS:
            raise NightmillError(
                f"the worker has died {self._deaths} times in a row, without a row done in between; the last "
                f"time with exit code {worker.exit_code}. Its log says more: {worker.log}. The rows stay "
                "queued, and the same command goes on with them"
            )

    def _bury_earlier(self) -> None:
        """We have the lock: the worker that is written down, if any, has died with the one who started it."""
        self._lock.seek(0)
        worker_id = self._lock.read().strip()
        if _ID.fullmatch(
            worker_id
        ):  # an earlier version wrote other things, whose jobs wait for the stale time
            self._sweep.bury(worker_id, blame=False)
        self._write("")

    def _write(self, worker_id: str) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(worker_id)
        self._lock.flush()

    def _take_lock(self) -> bool:
        if not self._locked:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._locked = True
        return True

    def _release_lock(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._locked = False
