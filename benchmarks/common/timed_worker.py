"""A worker that keeps the times of its engine's steps: where a night goes, and what happens only once.

For `nightly.py`. The file that ENGINE_TIMES names gets a line of JSON a few times a second, with sums since
the start.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import Drawn, StepBatch
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.products.chooser import Product
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.own_engine import run_module

NAME = "benchmarks.common.timed_worker"
COMMAND = (sys.executable, "-m", NAME)
TIMES = "ENGINE_TIMES"
_EVERY = 0.2  # seconds


class StepTimes:
    """Counts what an engine's runner does from here on; its methods are replaced.

    steps, replayed    launches, and those of them that were a captured graph
    launch_seconds     of the host, in `launch`
    wait_seconds       of the host, for the GPU: small where the host is what all waits for
    idle_steps         launches before which the GPU had nothing left to do
    captures, choices  graphs that were captured, and products whose way was chosen, in a night
    late_seconds       of the host, for those
    """

    def __init__(self, engine: Engine, file: Path | None = None) -> None:
        self._runner: Any = engine._runner
        self._file = file
        self._told_at = 0.0
        self._counts = dict.fromkeys(
            (
                "steps", "replayed", "launch_seconds", "wait_seconds", "idle_steps", "captures", "choices",
                "late_seconds",
            ),
            0.0,
        )  # fmt: skip
        self._launch, self._collect = self._runner.launch, self._runner.collect
        self._runner.launch, self._runner.collect = self.launch, self.collect
        for owner, name, counted in ((Graph, "__init__", "captures"), (Product, "_choose", "choices")):
            self._count_late(owner, name, counted)
        replay = Graph.launch

        def replayed(graph: Graph) -> None:
            self._counts["replayed"] += 1
            replay(graph)

        Graph.launch = replayed  # type: ignore[method-assign]

    def launch(self, batch: StepBatch) -> None:
        """As the runner's."""
        began = time.perf_counter()
        self._counts["idle_steps"] += self._idle()
        self._launch(batch)
        self._counts["launch_seconds"] += time.perf_counter() - began
        self._counts["steps"] += 1
        self._tell()

    def collect(self) -> Drawn | None:
        """As the runner's."""
        began = time.perf_counter()
        drawn: Drawn | None = self._collect()
        self._counts["wait_seconds"] += time.perf_counter() - began
        self._tell()
        return drawn

    def counted(self) -> dict[str, float]:
        """The sums so far."""
        return dict(self._counts)

    def _idle(self) -> bool:
        """Whether the GPU is done with the last launch."""
        runner = self._runner
        if not isinstance(runner, CudaRunner) or not runner._pending:
            return True
        return bool(runner._done[runner._pending[-1].turn].query())

    def _count_late(self, owner: Any, name: str, counted: str) -> None:
        call = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._counts[counted] += 1
                self._counts["late_seconds"] += time.perf_counter() - began

        setattr(owner, name, timed)

    def _tell(self) -> None:
        now = time.time()
        if self._file is not None and now >= self._told_at + _EVERY:
            self._told_at = now
            with self._file.open("a") as file:
                file.write(json.dumps({"time": now} | self._counts) + "\n")


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was counted in between."""
    return {name: round(value - before.get(name, 0.0), 3) for name, value in after.items()}


def between(file: Path, began: float, ended: float) -> dict[str, Any]:
    """What the lines of a night say, but for its last fifth of a second; and when its first step was."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    before = [line for line in lines if line["time"] < began]
    within = [line for line in lines if began <= line["time"] <= ended]
    steps = difference(before[-1] if before else {}, within[-1])
    steps.pop("time")
    return {"first_step_after_seconds": round(within[0]["time"] - began, 2), "steps": steps}


def build(settings: Settings, model: OpenModel) -> Engine:
    """As `build_engine`."""
    engine = build_engine(settings, model)
    StepTimes(engine, Path(os.environ[TIMES]))
    return engine


if __name__ == "__main__":
    run_module(NAME, build)
