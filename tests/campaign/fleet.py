"""Worker processes, kept alive as by a supervisor, and watched: what they use, what they leave behind."""

import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.campaign.report import Report
from tests.campaign.world import World
from tests.servers import wait_until

COMMAND = (sys.executable, "-m", "tests.campaign.worker", "worker")
RESTART_SECONDS = 0.5
ORPHAN_SECONDS = 15.0  # that an engine may outlive its worker
MEMORY_MIB = 1024  # of its processes together: 300 when they start, and what a hostile template may take
END_SECONDS = 60.0  # from SIGTERM to the end: drain time, and patience with an engine that hangs


class Fleet:
    """`size` workers; each that ends is started again until `stop`."""

    def __init__(self, world: World, size: int, report: Report) -> None:
        self._world = world
        self._report = report
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * size
        self._restart_at = [0.0] * size
        self._told_to_end: dict[int, float] = {}  # pid -> when
        self._known: dict[tuple[int, float], psutil.Process] = {}  # every descendant ever seen
        self._alone_since: dict[tuple[int, float], float] = {}
        self._expected: set[int] = set()  # pids whose end we brought about
        self._frozen: set[int] = set()
        self.clocks = [world.home / f"clock-{number}" for number in range(size)]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Return when every worker takes jobs; a campaign on workers that do not start is worth nothing."""
        query = "SELECT count(*) FROM workers WHERE state = 'ready'"
        size = len(self._processes)
        try:
            wait_until(lambda: self._world.sql(query)[0][0] >= size, 60.0, f"the start of {size} workers")
        except AssertionError as error:
            said = "\n".join(log.read_text(errors="replace")[-1500:] for log in self.logs[:1])
            raise RuntimeError(f"{error}; a worker's log ends:\n{said}") from None

    # -- what is done to them ----------------------------------------------------------------------

    def kill(self, worker: int) -> None:
        """kill -9 of the parent."""
        self._signal(worker, signal.SIGKILL)

    def terminate(self, worker: int) -> None:
        """SIGTERM: it is to drain, and to end in time."""
        if (process := self._processes[worker]) is not None:
            self._told_to_end.setdefault(process.pid, time.monotonic())
            self._signal(worker, signal.SIGTERM)

    def kill_engine(self, worker: int) -> None:
        """kill -9 of the engine alone."""
        self._signal_children(worker, signal.SIGKILL)

    def hang_engine(self, worker: int) -> None:
        """SIGSTOP of the engine alone."""
        self._signal_children(worker, signal.SIGSTOP)

    def freeze(self, worker: int) -> None:
        """SIGSTOP of all processes of a worker, or (-1) of every one."""
        for number in self._chosen(worker):
            self._signal(number, signal.SIGSTOP)
            self._signal_children(number, signal.SIGSTOP)

    def thaw(self, worker: int) -> None:
        """SIGCONT of everything that belongs to it."""
        for process in list(self._known.values()):
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)

    def limit_files(self, worker: int, largest: int | None) -> None:
        """Let its processes write no file beyond so many bytes: what a full disk is to them."""
        process = self._processes[worker]
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(
                    process.pid, resource.RLIMIT_FSIZE, (hard if largest is None else largest, hard)
                )

    # -- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all in order, and look for what is left."""
        self._closing.set()
        self._thread.join()
        self.thaw(-1)
        ending = {number for number in range(len(self._processes)) if self._is_ending(number)}
        for number in range(len(self._processes)):
            self.terminate(number)
        give_up_at = time.monotonic() + END_SECONDS
        for number, process in enumerate(self._processes):
            if process is None:
                continue
            try:
                code = process.wait(max(0.1, give_up_at - time.monotonic()))
                if number in ending:
                    self._report.count("worker ends")
                elif code not in (0, -signal.SIGTERM) and process.pid not in self._expected:
                    self._report.violate("exit", f"a worker that was told to end did so with {code}")
            except subprocess.TimeoutExpired:
                self._report.violate("never-ends", f"a worker still runs {END_SECONDS:.0f} s after SIGTERM")
                process.kill()
                process.wait()
        time.sleep(2.0)
        for child in list(self._known.values()):
            with suppress(psutil.NoSuchProcess):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    self._report.violate("orphan", f"left behind: {' '.join(child.cmdline())[-120:]}")
                    child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Where the campaign itself was broken off, nothing of it goes on."""
        self._closing.set()
        self._thread.join()
        for process in self._processes:
            if process is not None and process.poll() is None:
                self.thaw(-1)
                process.kill()
                process.wait()

    @property
    def logs(self) -> list[Path]:
        return sorted(self._world.home.glob("worker-*.log"))

    def _is_ending(self, worker: int) -> bool:
        """Whether its engine was killed, so that it ends by itself: an end that a fault must explain."""
        log = self._world.home / f"worker-{worker}.log"
        since_start = log.read_text(errors="replace").rpartition("ready: ")[2]
        return "the engine failed: its process ended" in since_start

    # -- supervision -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(0.25):
            for number, process in enumerate(self._processes):
                if process is not None and process.poll() is None:
                    self._look_at(process)
                elif process is not None:
                    self._report.count("worker ends")
                    self._told_to_end.pop(process.pid, None)
                    self._processes[number] = None
                    self._restart_at[number] = time.monotonic() + RESTART_SECONDS
                elif time.monotonic() >= self._restart_at[number]:
                    self._start(number)
            self._look_for_orphans()

    def _start(self, number: int) -> None:
        with (self._world.home / f"worker-{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                COMMAND,
                env=self._world.environment | {"CAMPAIGN_CLOCK": str(self.clocks[number])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._report.count("worker starts")

    def _look_at(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family = [parent, *parent.children(recursive=True)]
            self._known |= {(one.pid, one.create_time()): one for one in family}
            if any(one.status() == psutil.STATUS_STOPPED for one in family[:1]):
                self._told_to_end.pop(process.pid, None)  # who is frozen cannot end
            mib = sum(one.memory_info().rss for one in family) / 2**20
            self._report.counts[f"{self._report.part}: largest worker, MiB"] = max(
                round(mib), self._report.counts[f"{self._report.part}: largest worker, MiB"]
            )
            if mib > MEMORY_MIB:
                self._report.violate("memory", f"a worker has more than {MEMORY_MIB} MiB")
        told = self._told_to_end.get(process.pid)
        if told is not None and time.monotonic() - told > END_SECONDS:
            self._report.violate("never-ends", f"a worker still runs {END_SECONDS:.0f} s after SIGTERM")
            process.kill()

    def _look_for_orphans(self) -> None:
        mains = {process.pid for process in self._processes if process is not None}
        for key, process in list(self._known.items()):
            try:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    del self._known[key]
                    self._alone_since.pop(key, None)
                elif (
                    process.pid in mains
                    or process.ppid() in mains
                    or process.status() == psutil.STATUS_STOPPED
                ):
                    self._alone_since.pop(key, None)
                elif not any(parent.pid in mains for parent in process.parents()):
                    since = self._alone_since.setdefault(key, time.monotonic())
                    if time.monotonic() - since > ORPHAN_SECONDS:
                        said = " ".join(process.cmdline())[-120:]
                        self._report.violate(
                            "orphan", f"outlives its worker by {ORPHAN_SECONDS:.0f} s: {said}"
                        )
                        process.kill()
            except psutil.NoSuchProcess:
                self._known.pop(key, None)

    def _chosen(self, worker: int) -> list[int]:
        return list(range(len(self._processes))) if worker < 0 else [worker]

    def _signal(self, worker: int, number: signal.Signals) -> None:
        process = self._processes[worker]
        if process is not None and process.poll() is None:
            if number is signal.SIGKILL:
                self._expected.add(process.pid)
            process.send_signal(number)

    def _signal_children(self, worker: int, number: signal.Signals) -> None:
        process = self._processes[worker]
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():
                if "engine" in child.cmdline():
                    child.send_signal(number)
