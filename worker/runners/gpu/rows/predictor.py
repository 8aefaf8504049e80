"""The arrays of a block that predicts further tokens, beside those of its layer; launches `predictor.cu`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nightmill.worker.runners.base import DRAW, IntArray
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import ELEMENT, INT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, members, source_of
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.step_inputs import StepInputs
from nightmill.worker.runners.gpu.weights.layout import NormWeight

__all__ = [
    "GUESSES",
    "MOST_GUESSED",
    "PAIRS_AT_ONCE",
    "DrawGroup",
    "PredictorRows",
    "Sizing",
    "predictor_sources",
]

GUESSES = 3
"""Most tokens that are guessed behind a draw, as in `predictor.cu`: each is worse than the one before."""
MOST_GUESSED = 16
"""Sequences behind whose draws a step guesses: with more, drafts are not made."""
PAIRS_AT_ONCE = 1024
"""Rows for which there is room beside each other."""

_WARP, _BLOCK = (32, 1, 1), (256, 1, 1)
_CHOSEN = 4  # numbers of `chosen` in predictor.cu, and of a piece of a context


class DrawGroup(NamedTuple):
    """The draws of a sequence in a step: the first, how many, and which chunk has its page table."""

    first: int
    draws: int
    chunk: int


class Sizing(NamedTuple):
    """Sizes that a model has.

    tokens, draws  the most of a step
    slots          sequences at once
    table_width    pages of a sequence
    context        tokens of a sequence
    pages          of its cache; what counts for nothing is written to the last
    depth          launches that may be outstanding
    """

    tokens: int
    draws: int
    slots: int
    table_width: int
    context: int
    pages: int
    depth: int


class PredictorRows:
    """Queues the kernels, on arrays of its own. `width`: of the residual stream."""

    def __init__(self, device: Device, width: int, sizing: Sizing) -> None:
        self.sizing, depth = sizing, sizing.depth
        self._device = device
        self._padding_row = (sizing.pages - 1) * PAGE
        kernels = KernelPairs(device, *predictor_sources())
        self._choose = kernels.function("choose_draws", "PPPPPPPPPPPii")
        self._next = kernels.function("next_tokens", "PPPi")
        self._pairs = kernels.function("pair_rows", "PPPPPif")
        self._float_pairs = kernels.function("pair_float_rows", "PPPPPif")
        self._go_on = kernels.function("go_on", "PPPPPPPPPiiii")
        sizes = _sizes(width, sizing.tokens, sizing.draws, sizing.table_width)
        at = dict(zip(sizes, (device.allocate(size, "guesses") for size in sizes.values()), strict=True))
        self.pairs = Buffer(at["pairs"], (padded_rows(PAIRS_AT_ONCE), 2 * width), ELEMENT)
        """Norms of embeddings and of states beside each other."""
        self.normed = Buffer(at["normed"], (padded_rows(sizing.draws), width), ELEMENT)
        """Room for the normed states of the rows that draw, where all rows have one."""
        self.tokens = Buffer(at["tokens"], (padded_rows(sizing.tokens),), INT)
        self.drawn = Buffer(at["drawn"], (MOST_GUESSED,), INT)
        self.slots, self.rows, self.guessing = at["slots"], at["rows"], at["guessing"]
        """Addresses of parameters, of the rows of a step, and of the draws that guess behind them."""
        self._groups, self._known = at["groups"], at["known"]
        self._chosen, self._guesses, self._pieces = at["chosen"], at["guesses"], at["pieces"]
        self._tables, self._width = at["tables"], sizing.table_width
        places, rows, contexts = at["places"], at["cache_rows"], at["contexts"]
        own = device.upload(np.arange(MOST_GUESSED, dtype=np.int32), "guesses")
        self.inputs = StepInputs(
            self._tables, self._width, self.tokens.address, own, places, rows, own, contexts, own,
            self.guessing, 0, self._pieces,
        )  # fmt: skip
        """Those of a step of the sequences that guess, a token of each."""
        self._staged = [device.pinned(sizing.tokens + 2 * MOST_GUESSED, np.int32) for _ in range(depth)]
        self._staged_tables = [
            device.pinned((MOST_GUESSED, sizing.table_width), np.int32) for _ in range(depth)
        ]
        self._told = [device.pinned((MOST_GUESSED, 1 + GUESSES), np.int32) for _ in range(depth)]

    @staticmethod
    def workspace(width: int, *, tokens: int, draws: int, table_width: int) -> int:
        """Bytes of device memory that the arrays take."""
        own = _sizes(width, tokens, draws, table_width)
        return sum(map(aligned, (*own.values(), 4 * MOST_GUESSED)))

    def stage(
        self, turn: int, known: IntArray, groups: Sequence[DrawGroup], page_tables: IntArray, rows: int
    ) -> None:
        """Queue the copy of what is known of a step of `rows` rows, padding included.

        turn         a staging buffer whose earlier copies are done
        known        (T,) tokens behind those of the step, or -1 - the number of the draw that gives them
        groups       the draws behind which is guessed
        page_tables  (S, B) of the step's chunks
        """
        staged = self._staged[turn]
        staged[: len(known)], staged[len(known) : rows] = known, 0
        self._device.copy_in(self._known, staged[:rows])
        if groups:
            own = staged[rows : rows + 2 * len(groups)]
            own.reshape(-1, 2)[:] = [(one.first, one.draws) for one in groups]
            self._device.copy_in(self._groups, own)
            tables, width = self._staged_tables[turn], page_tables.shape[1]
            tables[: len(groups), :width] = page_tables[[one.chunk for one in groups]]
            self._device.copy_rows_in(self._tables, 4 * self._width, tables[: len(groups)], 4 * width)

    def choose(self, inputs: StepInputs, drawn: Buffer, tokens: Buffer, slots: int, count: int) -> None:
        """Queue the choice of a draw of each group, by what the step's draws (R,) drew.

        tokens  of the step (T,), slots the address of the table of slots
        """
        self._choose.of(count)(
            (1, 1), _WARP, self._groups, inputs.draws, drawn.address, tokens.address, inputs.cache_rows,
            slots, self.slots, self._chosen, self.rows, self.guessing, self._guesses, self.sizing.context,
            count,
        )  # fmt: skip

    def next_tokens(self, drawn: Buffer, rows: int) -> None:
        """Queue `tokens` (T,): those behind the step's."""
        self._next.of(rows)(blocks_for(rows), _BLOCK, self._known, drawn.address, self.tokens.address, rows)

    def pair(
        self, embedded: Buffer, embedding_norm: NormWeight, states: Buffer, state_norm: NormWeight, rows: int
    ) -> None:
        """Queue `pairs` of at most PAIRS_AT_ONCE rows of embeddings, floats, and states (rows, width)."""
        kernel = self._pairs if states.dtype == ELEMENT else self._float_pairs
        kernel.of(rows)(
            (rows, 2), _BLOCK, embedded.address, embedding_norm.weight.address, states.address,
            state_norm.weight.address, self.pairs.address, embedded.shape[1], embedding_norm.eps,
        )  # fmt: skip

    def go_on(self, turn: int, segment: int, count: int) -> None:
        """Queue that the guesses of a turn were drawn; `segment`: of pieces of contexts, 0: without."""
        at = self.inputs
        self._go_on.of(count)(
            (1, 1), _WARP, self._chosen, self.drawn.address, self._guesses, at.tokens, at.positions,
            at.cache_rows, at.context_lengths, self._pieces, self.guessing, turn, self._padding_row, segment,
            count,
        )  # fmt: skip

    def tell(self, turn: int, count: int) -> None:
        """Queue the copy of the newest step's guesses."""
        self._device.copy_out(self._told[turn][:count], self._guesses)

    def told(self, turn: int, count: int, draws: int) -> IntArray:
        """The guesses that were copied for a step that is over, behind each of its draws: (R, GUESSES)."""
        found = np.full((draws, GUESSES), -1, dtype=np.int32)
        told = self._told[turn][:count]
        found[told[:, 0]] = told[:, 1:]
        return found


def predictor_sources() -> list[Source]:
    """The kernel files of a model that has such a block."""
    return [source_of("predictor", members("SLOT_MEMBERS", SLOT), members("DRAW_MEMBERS", DRAW))]


def _sizes(width: int, tokens: int, draws: int, table_width: int) -> dict[str, int]:
    """Bytes of the arrays."""
    few, each = 4 * MOST_GUESSED, 4 * padded_rows(tokens)
    return {
        "pairs": padded_rows(PAIRS_AT_ONCE) * 2 * width * ELEMENT.itemsize,
        "normed": padded_rows(draws) * width * ELEMENT.itemsize,
        "tokens": each,
        "known": each,
        "tables": few * table_width,
        "slots": MOST_GUESSED * SLOT.itemsize,
        "guessing": MOST_GUESSED * DRAW.itemsize,
        "groups": 2 * few,
        "chosen": _CHOSEN * few,
        "pieces": _CHOSEN * few,
        "guesses": (1 + GUESSES) * few,
        **dict.fromkeys(("drawn", "rows", "places", "cache_rows", "contexts"), few),
    }
