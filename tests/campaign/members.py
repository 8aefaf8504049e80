"""The processes of a night, a worker or an HTTP server each, and the signals that they are sent."""

import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.campaign.limits import REQUEST_SECONDS, grace
from tests.campaign.promptness import Ending, Stop
from tests.campaign.world import World

COMMAND = (sys.executable, "-m", "tests.campaign.worker")


class Member:
    """A process that a supervisor keeps alive, by its name and number."""

    def __init__(self, world: World, kind: str, number: int) -> None:
        self.kind = kind
        self.name = f"{kind}-{number}"
        self.log = world.home / f"{self.name}.log"
        self.clock = world.home / f"clock-{self.name}"
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at = 0.0
        self.started_at = 0.0
        self.ending: Ending | None = None  # of the process that runs
        self.stops: list[Stop] = []  # of all its processes
        self.endings: list[Ending] = []
        self.killed: set[int] = set()  # pids whose end we brought about
        self._world = world
        self.port = world.ports[number] if kind == "server" else 0
        self._in_turn = kind == "worker" and number == 0
        self._arguments = _serving(self.port) if kind == "server" else ["worker"]
        if self._in_turn:
            self._arguments += world.in_turn
        self._answering = 0  # the pid that has answered
        self._stopped: list[psutil.Process] = []
        self._stopped_engines: list[psutil.Process] = []

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it."""
        environment = self._world.environment | {"CAMPAIGN_CLOCK": str(self.clock)}
        if self._in_turn:
            environment.pop("NIGHTMILL_MODEL", None)  # it has several
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self._arguments], env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started_at = time.monotonic()

    def ended(self) -> None:
        """Note that the process is not there any more."""
        now = time.monotonic()
        if self.ending is not None and self.ending.ended is None:
            self.ending.ended = now
        for stop in self.stops:
            stop.ended = now if stop.ended is None else stop.ended
        self.ending = self.process = None
        self._stopped.clear()

    def answered(self, process: "subprocess.Popen[bytes] | None") -> None:
        """Note that a server's process has answered once."""
        if process is not None:
            self._answering = process.pid

    def is_undisturbed(self, process: "subprocess.Popen[bytes] | None", since: float) -> bool:
        """Whether the same process has listened since then, and was neither stopped nor asked to end."""
        if process is None or self.process is not process or not self.runs:
            return False
        stopped = any(stop.ended is None or stop.ended >= since for stop in self.stops)
        ends = self.ending is not None or process.pid in self.killed
        return self._answering == process.pid and not stopped and not ends

    @property
    def engine_hangs(self) -> bool:
        return any(engine.is_running() for engine in self._stopped_engines)

    # -- what is done to it ------------------------------------------------------------------------

    def kill(self) -> bool:
        """kill -9 of the parent; False where it does not run."""
        if not self.runs or self.process is None:
            return False
        self.killed.add(self.process.pid)
        self.process.kill()
        return True

    def terminate(self, hung: str = "") -> bool:
        """SIGTERM: it is to end in time. `hung`: what hangs beside."""
        if not self.runs or self.process is None:
            return False
        if self.ending is None:
            self.ending = Ending(self.name, self.process.pid, grace(self.kind), time.monotonic(), hung=hung)
            self.endings.append(self.ending)
        self.process.terminate()
        return True

    def freeze(self) -> bool:
        """SIGSTOP of all of its processes."""
        if not self.runs or self.process is None:
            return False
        self.stops.append(Stop(self.name, self.process.pid, time.monotonic()))
        family = [*self.children(), psutil.Process(self.process.pid)]
        self._send(family, signal.SIGSTOP)
        self._stopped += family
        return True

    def thaw(self) -> None:
        """SIGCONT of what `freeze` stopped."""
        self._send(self._stopped, signal.SIGCONT)
        self._stopped.clear()
        now = time.monotonic()
        for stop in self.stops:
            stop.ended = now if stop.ended is None else stop.ended

    def hang_engine(self) -> bool:
        """SIGSTOP of the engine alone."""
        engines = self.engines()
        self._send(engines, signal.SIGSTOP)
        self._stopped_engines += engines
        return bool(engines)

    def continue_engine(self) -> None:
        """Undo it."""
        self._send(self._stopped_engines, signal.SIGCONT)
        self._stopped_engines.clear()

    def kill_engine(self) -> bool:
        """kill -9 of the engine alone."""
        engines = self.engines()
        self._send(engines, signal.SIGKILL)
        return bool(engines)

    def limit_files(self, largest: int | None) -> bool:
        """Let its processes write no file beyond so many bytes: what a full disk is to them."""
        if not self.runs or self.process is None:
            return False
        with suppress(ProcessLookupError, PermissionError):
            _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
            limits = (hard if largest is None else largest, hard)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)
        return True

    # -- what it is --------------------------------------------------------------------------------

    def children(self) -> list[psutil.Process]:
        """Every process that it has started, at any depth."""
        with suppress(psutil.NoSuchProcess):
            if self.process is not None:
                return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def engines(self) -> list[psutil.Process]:
        """The process of its engine."""
        found = []
        for child in self.children():
            with suppress(psutil.NoSuchProcess):
                if "engine" in child.cmdline():
                    found.append(child)
        return found

    def said_since_start(self, ready: str = "ready: ") -> tuple[bool, str]:
        """Whether it was ready once since it was started last, and what it said after that."""
        said = _tail(self.log)
        _, was_ready, after = said.rpartition(ready)
        return bool(was_ready), after

    def _send(self, processes: list[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _serving(port: int) -> list[str]:
    return ["serve", "--port", str(port), "--request-seconds", str(REQUEST_SECONDS)]


def _tail(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
