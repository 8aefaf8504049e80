"""A worker whose runner does no arithmetic: what remains is the cost of everything else.

Its texts are meaningless.
"""

import sys
from collections import deque
from collections.abc import Sequence

import numpy as np

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.commands.serving import worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import Drawn, IntArray, StepBatch
from tests.support.own_engine import engine_on, run_module

NAME = "tests.support.instant_worker"
COMMAND = (sys.executable, "-m", NAME)

SEQUENCES = 512  # unless --max-sequences says more
CONTEXT = 1024


class InstantRunner:
    """Draws token 65 for every row at once."""

    page_size = 16
    page_kinds = ()
    depth = 1
    arithmetic = Arithmetic(
        runner="instant", device="none", weights="none", kv="none", kernels="none", model="none"
    )

    def __init__(self, vocab: int, slots: int) -> None:
        self.vocab = vocab
        self.slots = self.max_draws = slots
        self.prompt_grid, self.snapshots, self.embeds = 1, 0, False
        self.kv_pages = slots * CONTEXT // self.page_size
        self._drawn: deque[Drawn] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Draw as many as the step does."""
        self._drawn.append(Drawn(np.full(len(batch.draws), 65, dtype=np.int32)))

    def mask_room(self, count: int) -> IntArray:
        """Refuse: rows of measurements are held to no schema."""
        raise AssertionError("a row of a measurement asks for a mask")

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
