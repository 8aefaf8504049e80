"""The part `models`: mutated model files, opened in a child that is killed where it does not come back."""

import itertools
import json
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from nightmill.worker.assembly.model import demo_model
from tests.campaign import gguf_document, mutants
from tests.campaign.report import Report
from tests.support.ggufs import sentencepiece_vocabulary, write_model
from tests.support.servers import clean_environment, scratch_directory

OPENED_BY_ONE = 400  # files, then a new child begins
SECONDS, SECONDS_PER_MIB = 3.0, 1.0  # of processor time that a file may take
MIB, MIB_PER_MIB = 160.0, 40.0  # of memory
WALL_SECONDS = 60.0
WEIGHTS = (4, 4, 4, 1)  # of the sound files; the last is a thousand times larger


class Opener:
    """The child process, started again when it has died or done enough."""

    def __init__(self, beside: Path | None = None, largest_mib: float = float("inf")) -> None:
        self._arguments = [] if beside is None else [str(beside)]
        self._largest_mib = largest_mib
        self._process: subprocess.Popen[str] | None = None
        self._opened = 0

    def open(self, path: Path) -> dict[str, Any]:
        """What became of a file: the child's answer, or how it ended without one."""
        if self._process is None or self._opened >= OPENED_BY_ONE:
            self.close()
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._opened += 1
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        give_up_at = time.monotonic() + WALL_SECONDS
        while not select.select([process.stdout], [], [], 0.1)[0]:
            if time.monotonic() > give_up_at:
                used = sum(psutil.Process(process.pid).cpu_times()[:2])
                said = f"no answer after {WALL_SECONDS:.0f} s ({used:.0f} s of processor)"
                self.close()
                return {"outcome": "hang", "said": said}
            if (mib := _family_mib(process.pid)) > self._largest_mib:
                self.close()
                return {"outcome": "large", "said": f"its processes had {mib:.0f} MiB"}
        if not (line := process.stdout.readline()):
            code = process.wait()
            self.close()
            return {"outcome": "died", "said": f"the process ended with {code}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._opened = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaign.opener", *self._arguments],
            env=clean_environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def run(seed: int, seconds: float, report: Report) -> None:
    """Mutants until the time is used."""
    home = scratch_directory()
    opener = Opener()
    try:
        bases = [gguf_document.read(path) for path in _models(home)]
        give_up_at = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() > give_up_at:
                break
            draw = random.Random(f"{seed} mutant {number}")
            data = mutants.mutant(draw.choices(bases, WEIGHTS)[0], draw)
            path = home / "mutant.gguf"
            path.write_bytes(data)
            report.step = f"mutant {number}"
            judge(opener.open(path), path, f"{seed}-{number}", report)
            report.count("mutants")
            report.progress(f"{number + 1} mutants")
    finally:
        opener.close()
        shutil.rmtree(home)


def judge(answer: dict[str, Any], path: Path, name: str, report: Report) -> None:
    """Refused by name or accepted, at a cost that the file's size bounds; anything else is kept and told."""
    mib = path.stat().st_size / 2**20
    wrong = ""
    if answer["outcome"] not in ("accepted", "refused"):
        wrong = answer["said"]
    elif answer["seconds"] > SECONDS + SECONDS_PER_MIB * mib:
        answer["outcome"], wrong = "slow", f"{answer['seconds']:.1f} s for {mib:.2f} MiB"
    elif answer["mib"] > MIB + MIB_PER_MIB * mib:
        answer["outcome"], wrong = "large", f"{answer['mib']:.0f} MiB of memory for {mib:.2f} MiB"
    report.count(f"mutants {answer['outcome']}")
    if wrong:
        kept = Path(tempfile.gettempdir()) / f"nightmill-mutant-{name}.gguf"
        shutil.copy(path, kept)
        report.violate(f"model-{answer['outcome']}", f"{wrong[:300]}; the file: {kept}")


def _family_mib(pid: int) -> float:
    """Resident memory of a process and of all below it."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def _models(home: Path) -> list[Path]:
    """The sound files that mutants are made of."""
    small = {"layers": 1, "width": 32, "ffn": 32, "heads": 2, "kv_heads": 1}
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    return [
        write_model(home / "qwen2.gguf", "qwen2", **small),
        write_model(home / "qwen3.gguf", "qwen3", **small, rope_scaling=scaling),
        write_model(home / "llama.gguf", "llama", **small, vocabulary=sentencepiece_vocabulary(), tied=False),
        demo_model(),
    ]
