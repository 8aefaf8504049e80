"""Sees to it that a model is served: by a worker that is there, or by one of our own, restarted if it dies.

A lock file, held open by us and by our worker, says that one of them lives. Whoever gets the lock knows that
both of the earlier holders are gone, and can give their jobs back at once in place of waiting for silence.
"""

import fcntl
import json
import re
import signal
import socket
from datetime import timedelta
from typing import Any

from jobs.client import Client
from jobs.settings import make_data_dir
from jobs.sweep import Sweep
from worker.process import WorkerProcess

# Killed from outside, which says nothing about the jobs. After so many in a row without a row done, it may.
_INNOCENT = (-signal.SIGKILL, -signal.SIGTERM)
_MOST_INNOCENT = 3


class WorkerKeeper:
    """Keeps a worker for `model` where no other serves it. Call `check` every second or so."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._stale = timedelta(seconds=client.settings.stale_seconds)
        self._sweep = Sweep(client.database)
        self._deaths = 0
        self._done_at_death = 0
        self._recorded = False  # the workers' table knows it
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

        Raises NightmillError where our own worker does not start.
        """
        if self.own is not None and self._died(self.own):
            self._bury_own(self.own, done)
        if self.own is not None:
            if not self.own.ready:
                return "loading the model"
            self._record(self.own)
            return ""
        if not self._take_lock():
            return "" if self._served() else "waiting for the worker of an earlier run to end"
        self._bury_earlier()
        if self._served():
            self._release_lock()
            return ""
        self.own = WorkerProcess(self._client, self.log, pass_fds=[self._lock.fileno()])
        self._recorded = False
        self._write({"pid": self.own.popen.pid, "host": socket.gethostname()})
        return "loading the model"

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
    def ended(self) -> bool:
        """True where no worker of our own is running."""
        return self.own is None or self.own.exit_code is not None

    def close(self) -> None:
        """Drain our own worker, if there is one, and wait for its end."""
        if self.own is not None:
            self.own.close()
        self._lock.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _served(self) -> bool:
        """True where a live worker serves the model, or is about to."""
        since = self._client.database.now() - self._stale
        return any(
            row["model"] == self._model
            and row["state"] in ("starting", "ready")
            and row["heartbeat_at"] > since
            for row in self._client.store.workers()
        )

    def _died(self, worker: WorkerProcess) -> bool:
        """True where it has ended and may be started again; for one that fails to start, see its `ready`."""
        innocent = worker.exit_code in _INNOCENT and self._deaths <= _MOST_INNOCENT
        return worker.exit_code is not None and (self._recorded or innocent)

    def _record(self, worker: WorkerProcess) -> None:
        if not self._recorded:
            self._write({"workers": [row["id"] for row in worker.rows()]})
            self._recorded = True

    def _bury_own(self, worker: WorkerProcess, done: int) -> None:
        if done > self._done_at_death:
            self._deaths = 0
        self._deaths += 1
        self._done_at_death = done
        blame = worker.exit_code not in _INNOCENT or self._deaths > _MOST_INNOCENT
        for row in worker.rows():
            self._sweep.bury(row["id"], blame=blame)
        worker.close()
        self.own = None
        self._write({})

    def _bury_earlier(self) -> None:
        """We have the lock: the worker that is written down, if any, has died with the one who started it."""
        self._lock.seek(0)
        text = self._lock.read()
        earlier: dict[str, Any] = json.loads(text) if text else {}
        workers = earlier.get("workers", [])
        for row in self._client.store.workers():
            same_process = (row["pid"], row["host"]) == (earlier.get("pid"), earlier.get("host"))
            if row["id"] in workers or (same_process and row["state"] in ("starting", "ready", "draining")):
                self._sweep.bury(row["id"], blame=False)
        self._write({})

    def _write(self, content: dict[str, Any]) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(json.dumps(content) if content else "")
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
