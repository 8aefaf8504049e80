"""A worker whose engine's process is killed by certain jobs; else it draws token 65, at no cost.

For `poison.py` and a test. A job with the seed POISON takes the process with it once all are in flight that
the worker could claim, so that they are suspects with it: the worst case.
"""

import os
import signal
import sys
import time

import nightmill.worker.app
import nightmill.worker.link.process
from benchmarks.instant_worker import InstantRunner
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.serving import worker as worker_command
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.loading import OpenModel, max_sequences
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.runners.base import StepBatch

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
    runner = PoisonedRunner(model.config.vocab, slots)
    runner.kv_blocks = slots * CONTEXT // runner.block_size
    return Engine(
        runner,
        text_stream=lambda: TextStream(model.vocabulary, strip_space=False),
        eos_ids=model.vocabulary.eos_ids,
        context_length=CONTEXT,
        max_sequences=slots,
        token_budget=16384,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:  # started by the worker, below
        nightmill.worker.link.process.build_engine = build_engine
        sys.exit(nightmill.worker.link.process.main())
    nightmill.worker.app.ENGINE_COMMAND = (sys.executable, __file__, "engine")
    worker_command.main(sys.argv[1:])
