"""A worker whose runner does no arithmetic: what remains is the cost of everything else.

For `end_to_end.py` only. Texts it writes are meaningless.
"""

import sys
from collections import deque
from collections.abc import Sequence

import numpy as np

from nightmill.jobs.arithmetic import Arithmetic
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.serving import worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.loading import OpenModel, max_sequences
from nightmill.worker.runners.base import Drawn, IntArray, StepBatch
from tests.own_engine import engine_on, run_module

NAME = "benchmarks.instant_worker"
COMMAND = (sys.executable, "-m", NAME)

SEQUENCES = 512  # unless --max-sequences says more
CONTEXT = 1024


class InstantRunner:
    """Draws token 65 for every row at once."""

    block_size = 16
    depth = 1
    arithmetic = Arithmetic(
        runner="instant", device="none", weights="none", kv="none", kernels="none", model="none"
    )

    def __init__(self, vocab: int, slots: int) -> None:
        self.vocab = vocab
        self.slots = self.max_draws = slots
        self.kv_blocks = slots * CONTEXT // self.block_size
        self._drawn: deque[Drawn] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Draw as many as the step does."""
        self._drawn.append(Drawn(np.full(len(batch.draws), 65, dtype=np.int32)))

    def mask_room(self, count: int) -> IntArray:
        """Nothing is masked."""
        raise NotImplementedError

    def draw(self, masks: IntArray) -> None:
        """Nothing is masked."""

    def collect(self) -> Drawn | None:
        """The oldest launch's tokens."""
        return self._drawn.popleft() if self._drawn else None

    def close(self) -> None:
        """Nothing is held."""


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The real engine, tokenizer and scheduler on the instant runner."""
    runner = InstantRunner(model.spec.vocab, max_sequences(settings))
    return engine_on(runner, settings, model, context=CONTEXT)


def serve(arguments: Sequence[str]) -> None:
    """Run a worker with such an engine."""
    options = ["--max-sequences", str(SEQUENCES), *arguments]
    run_module(NAME, build_engine, lambda: worker.main(options))


if __name__ == "__main__":
    serve(sys.argv[1:])
