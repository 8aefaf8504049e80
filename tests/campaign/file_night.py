"""The part `run`: `nightmill run` on one file, killed and started again; then each row is there exactly once.

The database and the Redis are the embedded ones. The last start is left in peace, and must end with success.
"""

import fcntl
import hashlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.campaign import model
from tests.campaign.disk import NO_DISK, Disk
from tests.campaign.lateness import Late, Watchdog, lost
from tests.campaign.limits import grace
from tests.campaign.plan import SHORTEST_HANG
from tests.campaign.report import Report
from tests.campaign.texts import answer
from tests.campaign.world import WORKER
from tests.support.servers import clean_environment

COMMAND = (sys.executable, "-m", "tests.campaign.worker", "run")
ROWS = 250
PEACE_SECONDS = 90.0  # that the last start may take
DISTURBANCES = (
    "kill_run",
    "kill_worker",
    "kill_engine",
    "kill_all",
    "interrupt",
    "terminate",
    "full",
    "second",
    "hang_run",
    "hang_worker",
    "hang_engine",
    "hang_redis",
    "results_gone",
    "disk_full",
)
HANGS = tuple(name for name in DISTURBANCES if name.startswith("hang_"))
START_SECONDS = 30.0
LONGEST_HANG = 20.0  # a file has 90 s in all


def run(seed: int, seconds: float, report: Report) -> None:
    """Files until the time is used, at least one."""
    report.planned(DISTURBANCES)
    give_up_at = time.monotonic() + seconds
    number = 0
    with Watchdog() as watchdog:
        while number == 0 or time.monotonic() < give_up_at:
            draw = random.Random(f"{seed} run {number}")
            with_faults(draw, report, f"file {number}", watchdog.lateness)
            number += 1


@dataclass(frozen=True)
class Disturbance:
    """What happens to a run, how many seconds after it was started, and what else is drawn for it."""

    name: str
    after: float
    number: int


def make_plan(draw: random.Random) -> list[Disturbance]:
    """Four starts of the command, each disturbed; drawn before the first."""
    return [
        Disturbance(draw.choice(DISTURBANCES), draw.uniform(0.5, 6.0), draw.randrange(1 << 30))
        for _ in range(4)
    ]


def with_faults(draw: random.Random, report: Report, name: str, lateness: Sequence[Late] = ()) -> None:
    """One file, disturbed four times."""
    home = Path(tempfile.mkdtemp(prefix="nightmill-campaign-run-"))
    violations = len(report.violations)
    plan = make_plan(draw)
    with Disk(home / "disk") as disk:
        night = _Night(disk, draw, report, lateness)
        try:
            for disturbance in plan:
                if disturbance.name in report.without:
                    continue
                report.step = f"{name}: {disturbance.name} ({disturbance.number})"
                report.progress(report.step)
                if night.disturbed(disturbance):
                    report.count(f"fault {disturbance.name}")
            report.step = f"{name}: left in peace"
            night.in_peace()
            night.check()
            report.count("files")
            report.count("rows", ROWS)
        finally:
            night.clean_up()
    if len(report.violations) == violations:
        shutil.rmtree(home)
    else:
        print(f"\nKept for a closer look: {home}")


class _Night:
    """One file, and the command on it."""

    def __init__(self, disk: Disk, draw: random.Random, report: Report, lateness: Sequence[Late]) -> None:
        self._home = home = disk.path.parent
        self._disk = disk
        self._report = report
        self._lateness = lateness
        self._results = disk.path / "results"
        self._results.mkdir()
        self._input, self._output = home / "rows.jsonl", self._results / "results.jsonl"
        self._rows = [_row(number, draw) for number in range(ROWS)]
        lines = [json.dumps(row) for row in self._rows]
        self._bad = draw.randrange(ROWS)
        lines[self._bad] = lines[self._bad].replace('"prompt"', '"prmpt"')
        self._input.write_text("\n".join(lines) + "\n")
        self._digest = hashlib.sha256(self._input.read_bytes()).hexdigest()
        settings = WORKER | {"data_dir": disk.path / "data", "model": model.write(home / "bytes.gguf")}
        self._environment = clean_environment() | {
            "NIGHTMILL_" + name.upper(): str(value) for name, value in settings.items()
        }
        self._environment |= {"CAMPAIGN_STEP": "0.02", "CAMPAIGN_HOME": str(home)}

    def start(self, log: str = "run.log") -> "subprocess.Popen[bytes]":
        """The same command each time."""
        with (self._home / log).open("ab") as output:
            return subprocess.Popen(
                [*COMMAND, str(self._input), "-o", str(self._output)], env=self._environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def disturbed(self, disturbance: Disturbance) -> bool:
        """Start it, and after a while see to it that it ends; False where it had ended before."""
        process = self.start()
        if disturbance.number % 4:  # the others are disturbed while they start
            self._wait_for_an_engine(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(disturbance.after)
            return False
        draw, done = random.Random(disturbance.number), True
        match disturbance.name:
            case "kill_run":
                process.kill()
            case "kill_worker":
                self._signal(process, "worker", signal.SIGKILL)
            case "kill_engine":
                self._signal(process, "engine", signal.SIGKILL)
            case "kill_all":
                for one in [psutil.Process(process.pid), *_family(process)]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
            case "interrupt":
                process.send_signal(signal.SIGINT)
            case "terminate":
                process.send_signal(signal.SIGTERM)
            case "full":
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2048, hard))
            case "second":
                self._second()
            case "results_gone":
                self._results_gone(draw)
            case "disk_full":
                if done := self._disk.fill():
                    time.sleep(draw.uniform(1.0, 4.0))
                    self._disk.free()
                else:
                    self._report.count(NO_DISK)
            case name if name in HANGS:
                done = self._hang(process, name.removeprefix("hang_"), draw)
        if disturbance.name in ("interrupt", "terminate"):
            self._wait_for_its_end(process, disturbance.name)
        with suppress(subprocess.TimeoutExpired):
            process.wait(4.0)
        process.kill()  # what goes on by itself is killed all the same
        process.wait()
        return done

    def _wait_for_an_engine(self, process: "subprocess.Popen[bytes]") -> None:
        """Until it has begun its work, which takes longer on a busy machine; or has ended."""
        give_up_at = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < give_up_at:
            with suppress(psutil.NoSuchProcess):
                if any("engine" in one.cmdline() for one in _family(process)):
                    return
            time.sleep(0.1)

    def _hang(self, process: "subprocess.Popen[bytes]", what: str, draw: random.Random) -> bool:
        """SIGSTOP of the command, its worker, the engine or the embedded Redis; mostly it ends beside."""
        match what:
            case "run":
                stopped = [psutil.Process(process.pid)] if process.poll() is None else []
            case "redis":
                stopped = [one for one in _ours(self._home) if "redis" in one.name()]
            case _:
                stopped = [one for one in _family(process) if what in one.cmdline()]
        for one in stopped:
            one.suspend()
        try:
            if what == "run" or draw.random() < 1 / 3:
                time.sleep(draw.uniform(SHORTEST_HANG, LONGEST_HANG))
            else:
                process.terminate()
                self._wait_for_its_end(process, f"terminate beside a hang of {what}")
        finally:
            for one in stopped:
                with suppress(psutil.NoSuchProcess):
                    one.resume()
        return bool(stopped)

    def _wait_for_its_end(self, process: "subprocess.Popen[bytes]", what: str) -> None:
        """It was asked to end: it does, within its grace."""
        asked = time.monotonic()
        while process.poll() is None:
            took = time.monotonic() - asked
            if took > grace("run") + lost(self._lateness, asked, time.monotonic()):
                said = f"a run still runs {took:.1f} s after {what}: {self._said()}"
                self._report.violate("never-ends", said)
                return
            time.sleep(0.1)
        self._report.count("ends timed")

    def _results_gone(self, draw: random.Random) -> None:
        """The folder of its results is away for a second, as a share is at times."""
        away = self._results.with_name("results-away")
        self._results.rename(away)
        time.sleep(draw.uniform(0.2, 1.5))
        with suppress(FileNotFoundError):  # made anew meanwhile
            for path in self._results.iterdir():
                path.rename(away / path.name)
            self._results.rmdir()
        away.rename(self._results)

    def in_peace(self) -> None:
        """Nobody disturbs it any more: it ends with 3, since one row of the file is bad."""
        process = self.start()
        try:
            code = process.wait(PEACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._report.violate("run-hangs", f"does not end within {PEACE_SECONDS:.0f} s: {self._said()}")
            return
        if code != 3:
            self._report.violate("run-code", f"ended with {code}: {self._said()}")

    def check(self) -> None:
        """Every row exactly once, in order, with its text; nothing else is left."""
        if hashlib.sha256(self._input.read_bytes()).hexdigest() != self._digest:
            self._report.violate("run-input", "the input was changed")
        results = _lines(self._output)
        expected = [row["custom_id"] for number, row in enumerate(self._rows) if number != self._bad]
        found = [row["custom_id"] for row in results]
        if found != expected:
            missing, more = len(set(expected) - set(found)), len(found) - len(set(found))
            said = f"{missing} rows are missing, {more} doubled, of {len(expected)}"
            self._report.violate("run-rows", said if missing or more else "results are not in order")
        rows = {row["custom_id"]: row for row in self._rows}
        for result in results:
            row = rows[result["custom_id"]]
            params = {name: row[name] for name in ("max_tokens", "temperature")}
            wanted = answer(row["prompt"], row["seed"], params)
            if (result["text"], result["stop_reason"]) != (wanted.text, wanted.stop_reason):
                self._report.violate("run-text", f"{result['custom_id']}: {result}"[:300])
        errors = _lines(self._results / "results.errors.jsonl")
        if len(errors) != 1:
            self._report.violate("run-errors", f"{len(errors)} errors in place of 1: {errors[:2]}"[:400])
        left = [path.name for path in self._results.iterdir() if "partial" in path.name]
        if left:
            self._report.violate("run-partial", f"left behind: {left}")

    def clean_up(self) -> None:
        """End everything, and look for what outlives the command."""
        alive: list[psutil.Process] = []
        for _ in range(40):
            alive = [one for one in _ours(self._home) if "redis" not in one.name()]
            if not alive:
                break
            time.sleep(0.25)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                self._report.violate("run-orphan", f"left behind: {' '.join(one.cmdline())[-100:]}")
                one.kill()
        servers = _ours(self._home)
        for one in servers:
            one.kill()  # the embedded Redis is to go on: here it has done its work
        psutil.wait_procs(servers, 10.0)
        for lock in self._home.rglob("*.lock"):
            with lock.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._report.violate("run-lock", f"{lock.name} is held, and nobody runs")

    def _second(self) -> None:
        """The same command twice at once: it works along, or ends with a clear line, and harms nothing."""
        second = self.start("second.log")
        try:
            code = second.wait(8.0)
        except subprocess.TimeoutExpired:
            second.kill()
            second.wait()
            return
        said = (self._home / "second.log").read_text(errors="replace")
        if "Traceback" in said:
            self._report.violate("run-second", f"a second run ends with {code}: {said.splitlines()[-1]}")

    def _signal(self, process: "subprocess.Popen[bytes]", word: str, number: signal.Signals) -> None:
        for one in _family(process):
            with suppress(psutil.NoSuchProcess):
                if word in one.cmdline():
                    one.send_signal(number)

    def _said(self) -> str:
        return " | ".join((self._home / "run.log").read_text(errors="replace").splitlines()[-4:])[-500:]


def _row(number: int, draw: random.Random) -> dict[str, Any]:
    return {
        "custom_id": f"row-{number}",
        "prompt": f"row {number} {draw.randrange(1 << 30)}",
        "seed": draw.randrange(1 << 40),
        "max_tokens": draw.choice((2, 10, 40, 150)),
        "temperature": draw.choice((0.0, 0.8)),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _ours(home: Path) -> list[psutil.Process]:
    """Every process that was started with this home; a Redis shows it in its title alone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            told = process.environ().get("CAMPAIGN_HOME") == str(home) or str(home) in " ".join(
                process.cmdline()
            )
            if told and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
