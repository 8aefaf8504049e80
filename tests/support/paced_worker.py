"""A worker whose steps take a tenth of a second, and no arithmetic: for tests that interrupt one.

So a job is under way for as long as a test needs, however busy the machine is, and costs no processor time.
`instant_worker` finishes what this one has left. Its texts are meaningless; all else is a worker's.
"""

import sys
import time

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import StepBatch
from tests.support.instant_worker import InstantRunner
from tests.support.own_engine import engine_on, run_module

NAME = "tests.support.paced_worker"
COMMAND = (sys.executable, "-m", NAME)

STEP_SECONDS = 0.1
CONTEXT = 512  # the demo model's


class PacedRunner(InstantRunner):
    """Draws token 65 for every row, after a pause."""

    def launch(self, batch: StepBatch) -> None:
        """As InstantRunner.launch, later."""
        time.sleep(STEP_SECONDS)
        super().launch(batch)


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The real engine, tokenizer and scheduler on that runner."""
    slots = max_sequences(settings)
    runner = PacedRunner(model.spec.vocab, slots)
    runner.kv_pages = slots * CONTEXT // runner.page_size
    return engine_on(runner, settings, model, context=CONTEXT)


if __name__ == "__main__":
    run_module(NAME, build_engine)
