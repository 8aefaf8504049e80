"""A worker whose engine's process is killed by certain jobs; else it draws token 65, at no cost.

A job with the seed POISON takes the process with it once all are in flight that
the worker could claim, so that they are suspects with it: the worst case.
"""

import os
import signal
import sys
import time

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import StepBatch
from tests.support.instant_worker import InstantRunner
from tests.support.own_engine import engine_on, run_module

NAME = "tests.support.poisoned_worker"
COMMAND = (sys.executable, "-m", NAME)

POISON = 666
SETTLE_SECONDS, SLOW_STEP_SECONDS = 0.5, 0.25
TOKENS = 40  # of a job: in slow steps, it is not done before the others are there
CONTEXT = 128


class PoisonedRunner(InstantRunner):
    """Slow while jobs arrive; once none does, quick, or the end of its process if a guilty one is there."""

    guilty = False
    arrived_at = 0.0

    def launch(self, batch: StepBatch) -> None:
        """As InstantRunner.launch, if it comes to that."""
        if batch.admissions:
            self.arrived_at = time.monotonic()
            self.guilty |= any(admission.seed == POISON for admission in batch.admissions)
        if time.monotonic() - self.arrived_at < SETTLE_SECONDS:
            time.sleep(SLOW_STEP_SECONDS)
        elif self.guilty:
            os.kill(os.getpid(), signal.SIGKILL)
        super().launch(batch)


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The real engine, tokenizer and scheduler on that runner."""
    slots = max_sequences(settings)
    runner = PoisonedRunner(model.spec.vocab, slots)
    runner.kv_pages = slots * CONTEXT // runner.page_size
    return engine_on(runner, settings, model, context=CONTEXT)


if __name__ == "__main__":
    run_module(NAME, build_engine)
