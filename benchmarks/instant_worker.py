"""A worker whose runner does no arithmetic: what remains is the cost of everything else.

For `end_to_end.py` only. Texts it writes are meaningless.
"""

import sys
from collections import deque

import numpy as np

import nightmill.worker.app
import nightmill.worker.link.process
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.serving import worker as worker_command
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.loading import OpenModel, max_sequences
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.runners.base import SampledTokens, StepBatch

SEQUENCES = 512  # unless --max-sequences says more
CONTEXT = 1024


class InstantRunner:
    """Draws token 65 for every row at once."""

    block_size = 16
    depth = 1
    arithmetic = "none"

    def __init__(self, vocab: int, slots: int) -> None:
        self.vocab = vocab
        self.slots = slots
        self.kv_blocks = slots * CONTEXT // self.block_size
        self._drawn: deque[SampledTokens] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Remember which slots draw."""
        self._drawn.append(SampledTokens(batch.sample_slots, np.full_like(batch.sample_slots, 65)))

    def collect(self) -> SampledTokens | None:
        """The oldest launch's tokens."""
        return self._drawn.popleft() if self._drawn else None

    def close(self) -> None:
        """Nothing is held."""


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The real engine, tokenizer and scheduler on the instant runner."""
    slots = max_sequences(settings)
    return Engine(
        InstantRunner(model.config.vocab, slots),
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
    worker_command.main(["--max-sequences", str(SEQUENCES), *sys.argv[1:]])
