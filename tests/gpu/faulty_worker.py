"""A worker whose runner reads from a wild address at its 20th step: what a broken kernel would do."""

import sys

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.device.operands import INT, Buffer
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.own_engine import run_module

NAME = "tests.gpu.faulty_worker"
COMMAND = (sys.executable, "-m", NAME)
WILD = 0x10
WILD_BUFFER = Buffer(WILD, (1,), INT)
STEPS = 20

launch = CudaRunner.launch
steps = 0


def launch_and_fail(self: CudaRunner, batch: StepBatch) -> None:
    """As CudaRunner.launch, with a read from nowhere behind the 20th step."""
    global steps
    launch(self, batch)
    steps += 1
    if steps == STEPS:
        self._model.shared.sampler.gather_tokens(WILD, WILD, WILD, WILD, WILD_BUFFER, WILD_BUFFER, 1)


def build_faulty(settings: Settings, model: OpenModel) -> Engine:
    """As `build_engine`, with that runner."""
    CudaRunner.launch = launch_and_fail  # type: ignore[method-assign]
    return build_engine(settings, model)


if __name__ == "__main__":
    run_module(NAME, build_faulty)
