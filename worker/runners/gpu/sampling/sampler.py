"""Launches the kernels of `cuda/sampling/`: draws, masks, and what touches the table of slots."""

from dataclasses import dataclass

import numpy as np

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import DRAW, MOST_LIKELY, mask_words
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, members, source_of
from nightmill.worker.runners.sampling import PARAMETERS

__all__ = ["SLOT", "ChunkPages", "Sampler"]

SLOT = np.dtype(
    [
        *PARAMETERS.descr,
        ("last_token", np.int32),
        ("adjusted", np.int32),
        ("answer_from", np.int32),
        ("biases", np.int32),
        ("words", np.int32),
        ("adjustments", np.uint64),
        ("seen", np.uint64),
    ],
    align=True,
)
"""A running sequence: PARAMETERS, and

last_token   that was drawn
adjusted     1 if `adjust` changes its logits, by the next four and its penalties
answer_from  the position of the first token of its answer
biases, words, adjustments  how many biases and banned runs of tokens it has, and the address where they are
seen         the address of its bitmap of tokens, 0 for none
"""

_BLOCK = (256, 1, 1)
_BLOCKS = 4  # of `sample` that a multiprocessor holds
_BEST_BYTES = 12


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """Device addresses of the pages of a step's chunks.

    tables  (count, width) int32, the pages of each chunk's sequence
    starts  (count + 1,) int32, where the chunks begin among the step's tokens
    """

    tables: int
    width: int
    starts: int
    count: int


class Sampler:
    """Draws as `worker.runners.sampling` defines it. What is no Buffer is a device address.

    max_rows  the most that are drawn at once
    """

    def __init__(self, device: Device, vocab: int, *, max_rows: int) -> None:
        self._device = device
        self._vocab = vocab
        self._max_rows = max_rows
        self._blocks = _BLOCKS * device.multiprocessors
        sample, filtered, masks, adjust, slots, likely = (
            KernelPairs(device, source) for source in _sources()
        )
        self._sample = sample.function("sample", "PiPPPPP")
        self._sample_filtered = filtered.function("sample_filtered", "PiPPPi")
        self._apply_masks = masks.function("apply_masks", "PiPPii")
        self._adjust = adjust.function("adjust", "PiPPPPiPi")
        self._admit = slots.function("admit", "PPPi")
        self._log_probabilities = likely.function("log_probabilities", "PiPPP")
        self._gather_tokens = slots.function("gather_tokens", "PPPPPPi")
        best, counters = _scratch(max_rows, device.multiprocessors)
        self._partial_best = device.allocate(best, "sampling")
        self._counters = device.allocate(counters, "sampling")
        device.fill(self._counters, 0, counters)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return _sources()

    @staticmethod
    def workspace(*, max_rows: int, multiprocessors: int) -> int:
        """Bytes of device memory that it takes."""
        return sum(_scratch(max_rows, multiprocessors))

    def admit(self, rows: int, places: int, slots: int, count: int) -> None:
        """slots[places[i]] = rows[i], records of SLOT."""
        self._admit.of(count)(blocks_for(count), _BLOCK, rows, places, slots, count)

    def gather_tokens(
        self, tokens: int, slot_of_token: int, slots: int, cache_rows: int, history: Buffer, out: Buffer,
        rows: int,
    ) -> None:  # fmt: skip
        """out[i] = tokens[i], or where that is negative the token last drawn in slot slot_of_token[i].

        It is written to history[cache_rows[i]], too, unless cache_rows[i] is negative.
        """
        if rows:
            inputs = (tokens, slot_of_token, slots, cache_rows, history.address, out.address, rows)
            self._gather_tokens.of(rows)(blocks_for(rows), _BLOCK, *inputs)

    def apply_masks(self, logits: Buffer, count: int, draws: int, masks: int, first: int) -> None:
        """Set logits (R, V) that the draws' masks do not allow to -inf; `masks`: from number `first` on."""
        words = mask_words(self._vocab)
        blocks = min(-(-self._blocks // count), -(-words // 32))
        self._apply_masks.of(count)(
            (blocks, count), _BLOCK, logits.address, self._vocab, draws, masks, words, first
        )

    def adjust(
        self, logits: Buffer, count: int, draws: int, slots: int, history: Buffer, chunks: ChunkPages
    ) -> None:
        """Adjust logits (R, V) of rows whose slot asks for it, as `worker.runners.adjusting` defines it.

        history  the tokens in the KV cache
        chunks   of the step
        """
        inputs = (logits.address, self._vocab, draws, slots, history.address)
        pages = (chunks.tables, chunks.width, chunks.starts, chunks.count)
        self._adjust.of(count)((count, 1), (1024, 1, 1), *inputs, *pages)

    def sample(self, logits: Buffer, count: int, draws: int, slots: int, out_tokens: Buffer) -> None:
        """Draw a token for each row of logits (R, V) float, whose rows have room for a multiple of 8.

        draws       (R,) DRAW; where the slot is negative, the row is skipped
        slots       the table of slots: last_token is set, and with a penalty the bit in the bitmap
        out_tokens  (R,) int32; NOT_A_NUMBER where the logits are none, and 0 in last_token
        """
        if count > self._max_rows:
            raise RunnerError(f"{count} rows to sample at once, but room for {self._max_rows}")
        inputs = (logits.address, self._vocab, draws, slots)
        # A block has 512 threads of 4 tokens: more blocks than that have nothing to do.
        blocks = min(-(-self._blocks // count), -(-self._vocab // 2048))
        self._sample.of(count)(
            (blocks, count), (512, 1, 1), *inputs, self._partial_best, self._counters, out_tokens.address
        )
        grid = (min(count, self._device.multiprocessors), 1)  # each at most 1,024 rows
        self._sample_filtered.of(count)(grid, (1024, 1, 1), *inputs, out_tokens.address, count)

    def log_probabilities(
        self, logits: Buffer, count: int, draws: int, out_tokens: Buffer, found: Buffer
    ) -> None:
        """Tell log-probabilities of the rows that ask, of logits (R, V) as masks and `adjust` left them.

        out_tokens  (R,) int32, what was drawn; tokens that are given are written there
        found       (R, FOUND.itemsize) bytes: records of FOUND; rows that do not ask are left alone
        """
        inputs = (logits.address, self._vocab, draws, out_tokens.address, found.address)
        self._log_probabilities.of(count)((count, 1), (1024, 1, 1), *inputs)


def _sources() -> list[Source]:
    """The files, which are told of the records by the types that the host has."""
    records = (members("SLOT_MEMBERS", SLOT), members("DRAW_MEMBERS", DRAW))
    names = ("sample", "sample_filtered", "apply_masks", "adjust", "slots")
    told = source_of("log_probabilities", *records, f"-DMOST_LIKELY={MOST_LIKELY}")
    return [*(source_of(name, *records) for name in names), told]


def _scratch(max_rows: int, multiprocessors: int) -> tuple[int, int]:
    """Bytes of the best tokens of blocks, at most `all at once + R` for R rows, and of counters."""
    return _BEST_BYTES * (max_rows + _BLOCKS * multiprocessors), 4 * max_rows
