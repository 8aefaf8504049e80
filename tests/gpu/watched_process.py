"""Runs what may trap or hang on a GPU in a process of its own, which is killed when it says nothing more."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

__all__ = ["ROOT", "Outcome", "run_watched"]

ROOT = Path(__file__).parents[2]
_KEPT = 12  # lines


class Outcome:
    """What a process said at last, and why it ended: `hung` if it was killed for its silence."""

    def __init__(self, lines: Sequence[str], code: int | None, hung: float) -> None:
        self.lines, self.code, self.hung = list(lines), code, hung

    def __str__(self) -> str:
        last = "\n".join(f"  {line}" for line in self.lines)
        if self.hung:
            return f"hung: said nothing for {self.hung:.0f} s after this and was killed:\n{last}"
        ended = f"was killed by signal {-self.code}" if (self.code or 0) < 0 else f"ended with {self.code}"
        return f"{ended} after this:\n{last}"


def run_watched(
    arguments: Sequence[str],
    patience: Callable[[str], float],
    *,
    keep: Callable[[str], bool] = lambda line: False,
) -> Outcome:
    """Run Python with these arguments and wait for its end.

    patience  seconds that it may say nothing, by what it said last ("" at first)
    keep      lines that are kept beside the last ones
    """
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    said: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.rstrip("\n"))
        said.put(None)

    Thread(target=read, daemon=True).start()
    last: deque[str] = deque(maxlen=_KEPT)
    kept: list[str] = []
    try:
        while True:
            seconds = patience(last[-1] if last else "")
            try:
                line = said.get(timeout=seconds)
            except Empty:
                return Outcome([*kept, *last], None, seconds)
            if line is None:
                break
            if keep(line):
                kept.append(line)
            else:
                last.append(line)
        return Outcome([*kept, *last], _ended(process), 0.0)
    finally:
        process.kill()  # also where this test itself is given up
        _ended(process)


def _ended(process: "subprocess.Popen[str]") -> int | None:
    """Its exit code; None if it is stuck in the driver and cannot even be killed."""
    give_up = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    return process.returncode
