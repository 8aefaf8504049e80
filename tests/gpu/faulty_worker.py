"""A worker whose runner reads from a wild address at its 20th step: what a broken kernel would do."""

import sys

import nightmill.worker.app
from nightmill.worker.commands.serving import worker as worker_command
from nightmill.worker.link import process as engine_process
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.runner import CudaRunner

WILD = 0x10
STEPS = 20

launch = CudaRunner.launch
steps = 0


def launch_and_fail(self: CudaRunner, batch: StepBatch) -> None:
    """As CudaRunner.launch, with a read from nowhere behind the 20th step."""
    global steps
    launch(self, batch)
    steps += 1
    if steps == STEPS:
        self._kernels.embed(WILD, WILD, WILD, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:  # started by the worker, below
        CudaRunner.launch = launch_and_fail  # type: ignore[method-assign]
        sys.exit(engine_process.main())
    nightmill.worker.app.ENGINE_COMMAND = (sys.executable, __file__, "engine")
    worker_command.main()
