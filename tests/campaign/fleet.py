"""Workers and HTTP servers, kept alive as by a supervisor, and watched: what they use and leave behind."""

import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx2
import psutil

from tests.campaign.lateness import Late, lost
from tests.campaign.members import Member
from tests.campaign.promptness import Ending, Stop, stopped
from tests.campaign.report import Report
from tests.campaign.world import World
from tests.support.servers import wait_until

RESTART_SECONDS = 0.5
ORPHAN_SECONDS = 15.0  # that an engine may outlive its worker
MEMORY_MIB = 1024  # of its processes together: 300 when they start, and what a hostile template may take
START_SECONDS = 90.0  # of all of them, on a busy machine


class Fleet:
    """`workers` workers and the world's HTTP servers; each that ends is started again until `stop`.

    `lateness` is the watchdog's list, by which the machine's own delay is allowed for.
    """

    def __init__(self, world: World, workers: int, report: Report, lateness: list[Late]) -> None:
        self._world = world
        self._report = report
        self._lateness = lateness
        self.workers = [Member(world, "worker", number) for number in range(workers)]
        self.servers = [Member(world, "server", number) for number in range(len(world.ports))]
        self._known: dict[tuple[int, float], psutil.Process] = {}  # every descendant ever seen
        self._alone_since: dict[tuple[int, float], float] = {}
        self._closing = threading.Event()
        self._lock = threading.RLock()  # the supervisor replaces processes that others send signals to
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.servers]

    @property
    def endings(self) -> list[Ending]:
        return [ending for member in self.members for ending in member.endings]

    @property
    def stops(self) -> list[Stop]:
        return [stop for member in self.members for stop in member.stops]

    @property
    def logs(self) -> list[Path]:
        return [member.log for member in self.members]

    def wait_until_ready(self) -> None:
        """Return when all take work; a campaign on workers that do not start is worth nothing."""
        query = "SELECT count(*) FROM workers WHERE state IN ('ready', 'sleeping')"  # until one has rows
        size = len(self.workers)
        try:
            wait_until(
                lambda: self._world.sql(query)[0][0] >= size, START_SECONDS, f"the start of {size} workers"
            )
            for port in self._world.ports:
                wait_until(lambda port=port: _answers(port), START_SECONDS, "the start of a server")
        except AssertionError as error:
            said = "\n".join(log.read_text(errors="replace")[-1500:] for log in self.logs if log.exists())
            raise RuntimeError(f"{error}; the logs end:\n{said}") from None

    def do(self, what: str, members: list[Member], *args: object) -> bool:
        """Call a method of each of these members; False where none of them could do it."""
        with self._lock:
            done = [getattr(member, what)(*args) for member in members]
        return any(one is not False for one in done)

    def undo_all(self) -> None:
        """Everything goes on, at full size and by the right clock."""
        with self._lock:
            for member in self.members:
                member.thaw()
                member.continue_engine()
                member.clock.unlink(missing_ok=True)
                member.limit_files(None)
            self._continue_orphans()

    # -- the end -----------------------------------------------------------------------------------

    def stop(self, hung: str) -> None:
        """End all in order while `hung` hangs, and look for what is left."""
        self._closing.set()
        self._thread.join()
        ending = {member.name for member in self.members if self._is_ending(member)}
        for member in self.members:
            member.terminate(hung)
        while running := [member for member in self.members if member.process is not None]:
            for member in running:
                if self._has_ended(member) and member.process is not None:
                    self._judge_code(member, member.process, by_itself=member.name in ending)
                    member.ended()
            time.sleep(0.1)

    def look_for_what_is_left(self) -> None:
        """Nothing of it is there any more, once everything that hung goes on."""
        self._continue_orphans()
        began = time.monotonic()
        while left := [child for child in self._known.values() if _is_alive(child)]:
            time.sleep(0.25)
            if time.monotonic() - began > ORPHAN_SECONDS + lost(self._lateness, began, time.monotonic()):
                break
        for child in left:
            with suppress(psutil.NoSuchProcess):
                self._report.violate("orphan", f"left behind: {' '.join(child.cmdline())[-120:]}")
                child.kill()

    def _judge_code(self, member: Member, process: subprocess.Popen[bytes], *, by_itself: bool) -> None:
        if by_itself:
            self._report.count(f"{member.kind} ends")
        elif process.returncode not in (0, -signal.SIGTERM) and process.pid not in member.killed:
            ending = member.ending
            if ending is not None and ending.killed:
                return  # the judge of time says so
            if ending is not None and ending.hung:  # the last resort's way out, with a code of its own
                self._report.count(f"{member.kind}s that ended with {process.returncode} beside a hang")
            else:
                said = f"a {member.kind} that was told to end did so with {process.returncode}"
                self._report.violate("exit", said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Where the campaign itself was broken off, nothing of it goes on."""
        self._closing.set()
        self._thread.join()
        for member in self.members:
            if member.process is not None and member.process.poll() is None:
                family = member.children()
                member.process.kill()
                member.process.wait()
                for one in family:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()

    def _is_ending(self, member: Member) -> bool:
        """Whether its engine was killed, so that it ends by itself: an end that a fault must explain."""
        return "the engine failed: " in member.said_since_start()[1]

    # -- supervision -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(0.25):
            with self._lock:
                for member in self.members:
                    if member.process is None:
                        if time.monotonic() >= member.restart_at:
                            member.start()
                            self._report.count(f"{member.kind} starts")
                    elif self._has_ended(member):
                        self._count_end(member)
                        member.ended()
                        member.restart_at = time.monotonic() + RESTART_SECONDS
                self._look_for_orphans()

    def _count_end(self, member: Member) -> None:
        """Ends must be explained; but for those of who could not begin while its servers were away."""
        started = member.said_since_start()[0] or member.kind == "server"
        if not started and self._world.hung_since(member.started_at):
            self._report.count(f"{member.kind} starts without servers")
        else:
            self._report.count(f"{member.kind} ends")

    def _has_ended(self, member: Member) -> bool:
        """Whether its process is gone; kills it where it was told to end and is past its grace."""
        process, ending = member.process, member.ending
        if process is None or process.poll() is not None:
            return True
        with suppress(psutil.NoSuchProcess):
            self._look_at(member, process)
        if ending is not None:
            now = time.monotonic()
            stops = [stop for stop in member.stops if stop.pid == ending.pid]
            extra = stopped(stops, ending.asked, now) + lost(self._lateness, ending.asked, now)
            if now - ending.asked > ending.grace + extra + 1.0:
                ending.killed = True
                process.kill()
                process.wait()
                return True
        return False

    def _look_at(self, member: Member, process: "subprocess.Popen[bytes]") -> None:
        family = [psutil.Process(process.pid), *member.children()]
        self._known |= {(one.pid, one.create_time()): one for one in family}
        mib = sum(one.memory_info().rss for one in family) / 2**20
        self._report.highest(f"largest {member.kind}, MiB", round(mib))
        if mib > MEMORY_MIB:
            self._report.violate("memory", f"a {member.kind} has more than {MEMORY_MIB} MiB")

    def _look_for_orphans(self) -> None:
        mains = {member.process.pid for member in self.members if member.process is not None}
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
                    if time.monotonic() - since > ORPHAN_SECONDS + lost(
                        self._lateness, since, time.monotonic()
                    ):
                        said = " ".join(process.cmdline())[-120:]
                        self._report.violate(
                            "orphan", f"outlives its worker by {ORPHAN_SECONDS:.0f} s: {said}"
                        )
                        process.kill()
            except psutil.NoSuchProcess:
                self._known.pop(key, None)

    def _continue_orphans(self) -> None:
        """What was stopped when its worker was killed."""
        for process in list(self._known.values()):
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _answers(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code == 200
    except httpx2.TransportError:
        return False
