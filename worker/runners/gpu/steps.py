"""Carries a step's arrays to the GPU: one pinned buffer per outstanding launch, one packed copy a step.

Block tables are copied apart, row by row into rows of fixed length, so that a captured graph finds them at
the same place however many pages the longest sequence has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import (
    DRAW,
    NO_LOGPROBS,
    NOT_GIVEN,
    UNMASKED,
    IntArray,
    KindRows,
    StepBatch,
    pooled_rows,
)
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.states.pieces import NO_STATE_PIECES, pieces_on_device, state_pieces
from nightmill.worker.runners.gpu.step_inputs import Division, StepInputs, StepShape

__all__ = ["PADDING", "StepBounds", "StepBuffers", "drawing_rows", "padded_lengths"]

_ALIGN = 64  # int32 words
_TILE_BYTES, _PIECE_BYTES = 8, 16
_DRAW_WORDS = DRAW.itemsize // 4

_NO_INTS = np.zeros(0, dtype=np.int32)
_NO_DRAWS = np.zeros(0, dtype=DRAW)
PADDING = StepBatch(*(_NO_INTS,) * 5, np.zeros((0, 1), dtype=np.int32), _NO_INTS, _NO_DRAWS, drawn=0)
"""A batch of no sequences, for `StepBuffers.write_padded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """The most that a step may have.

    table_width  pages of a sequence
    max_pieces   room for `StepInputs.pieces`, of all plans
    plans        divisions of a step
    paired       `ModelSpec.paired_positions`: so many more are added to positions of second texts
    states       layers have states, for which a step is divided into pieces
    strides      of the kinds of pages (`PageKind`)
    """

    max_tokens: int
    max_draws: int
    slots: int
    table_width: int
    max_pieces: int
    states: bool = False
    strides: tuple[int, ...] = (1,)
    plans: int = 1
    paired: int = 0

    @property
    def tail(self) -> "StepBounds":
        """The bounds of the rows that draw of a step, as a step of their own (`drawing_rows`)."""
        return replace(self, max_tokens=self.slots, max_draws=0, states=False)

    @property
    def words(self) -> int:
        """Words of the arrays of such a step."""
        rows = max(self.slots, 1)
        sizes = (self.max_tokens, rows, self.max_draws, self.max_tokens * self.plans, self.max_pieces)
        return _layout(*sizes, rows * self.states)[1]


class StepBuffers:
    """Staging for `depth` outstanding steps; `padding_page`: the page that padding tokens are written to."""

    def __init__(self, device: Device, bounds: StepBounds, *, padding_page: int, depth: int) -> None:
        self._device = device
        self._slots = bounds.slots
        self._states = bounds.states
        self._paired = bounds.paired
        self._padding_page = padding_page
        self._strides = bounds.strides
        self._padding_row = padding_page * bounds.strides[0] * PAGE
        self.table_width = table_width = bounds.table_width
        rows, words = max(bounds.slots, 1), bounds.words
        self._packed = device.allocate(4 * words, "a step's arrays")
        self._tables = device.allocate(4 * rows * table_width, "page tables")
        self._numbers = np.arange(rows + 1, dtype=np.int32)
        self._host = [device.pinned(words, np.int32) for _ in range(depth)]
        self._host_tables = [device.pinned((rows, table_width), np.int32) for _ in range(depth)]
        self._further = [
            _KindBuffers(device, bounds, rows=rows, padding_page=padding_page * stride, depth=depth)
            for stride in bounds.strides[1:]
        ]

    @staticmethod
    def bytes(bounds: StepBounds) -> int:
        """Device memory that the buffers take."""
        tables = max(bounds.slots, 1) * bounds.table_width
        further = (bounds.max_tokens + tables) * (len(bounds.strides) - 1)
        return 4 * (bounds.words + tables + further) + 1024 * len(bounds.strides)

    def write(
        self, turn: int, batch: StepBatch, shape: StepShape, tiles: Sequence[IntArray],
        pieces: Sequence[IntArray],
    ) -> StepInputs:  # fmt: skip
        """Queue the copy of a batch; `turn`: a buffer whose earlier copies are done.

        tiles, pieces  by plan

        Raises RunnerError where states are to begin with a prompt's token that they cannot begin with.
        """
        lengths = np.diff(batch.sequence_starts)
        states = state_pieces(batch) if self._states else NO_STATE_PIECES
        counted = sum(map(len, tiles)), sum(map(len, pieces))
        offsets, words = _layout(shape.tokens, shape.sequences, shape.draws, *counted, states.pieces)
        host = self._host[turn]
        arrays: tuple[npt.NDArray[np.integer[Any]], ...] = (
            batch.tokens,
            np.repeat(batch.slots, lengths),
            self._places(batch),
            batch.cache_rows,
            batch.sequence_starts,
            batch.context_lengths,
            np.concatenate([batch.draws["row"], pooled_rows(batch.pools)]),
            batch.draws.view(np.int32),
            np.concatenate(tiles).reshape(-1),
            np.concatenate(pieces).reshape(-1),
            states.arrays.reshape(-1),
        )
        for offset, array in zip(offsets, arrays, strict=True):
            host[offset : offset + len(array)] = array
        tables = self._host_tables[turn]
        count, width = batch.page_tables.shape
        tables[:count, :width] = batch.page_tables
        inputs, at = self._send(turn, offsets, words, count, width), self._packed + 4 * offsets[-1]
        inputs = _divided(inputs, shape.divisions)
        through = pieces_on_device(at, states.pieces, states.drawn, states.prompt_rows)
        return self._with_kinds(turn, replace(inputs, pieces_of_states=through), batch, 0)

    def _places(self, batch: StepBatch) -> IntArray:
        """The rows of the table of positions; whoever rotates by positions has no such table."""
        if batch.text_types is None or not self._paired:
            return batch.positions
        places: IntArray = batch.positions + self._paired * batch.text_types
        return places

    def write_padded(
        self, turn: int, batch: StepBatch, size: int, pieces: Sequence[IntArray], rooms: Sequence[int],
        *, again: bool = False,
    ) -> StepInputs:  # fmt: skip
        """Queue a batch in which a draw follows every token, which was drawn or guessed, padded to `size`.

        pieces  by plan, for the contexts of `padded_lengths`, padded to `rooms`
        again   a sequence may have several of the tokens
        """
        count = len(batch.slots)
        offsets, words = _layout(size, size, size, 0, sum(rooms), size * self._states)
        host = self._host[turn]
        arrays: tuple[tuple[IntArray, int], ...] = (
            (batch.tokens, 0),
            (batch.slots, self._slots),
            (batch.positions, 0),
            (batch.cache_rows, self._padding_row),
            (self._numbers[: size + 1], 0),
            (batch.context_lengths, 1),
        )
        for offset, (array, padding) in zip(offsets, arrays, strict=False):
            used = len(array)
            host[offset : offset + used] = array
            host[offset + used : offset + size] = padding
        draws = host[offsets[7] : offsets[7] + _DRAW_WORDS * size].view(DRAW)
        draws[:count] = batch.draws
        draws[count:] = (0, self._slots, 0, UNMASKED, NOT_GIVEN, NO_LOGPROBS)
        host[offsets[9] : offsets[9] + 4 * sum(rooms)] = -1
        first = offsets[9]
        for own, room in zip(pieces, rooms, strict=True):
            host[first : first + own.size] = own.reshape(-1)
            first += 4 * room
        if self._states:
            states = host[offsets[10] : offsets[10] + 4 * size].reshape(4, size)
            if again:
                through = state_pieces(batch).arrays
            else:
                ones = np.ones(count, dtype=np.int32)
                through = np.stack([self._numbers[:count], ones, batch.slots, batch.positions])
            used = through.shape[1]
            states[:, :used], states[:, used:] = through, 0
        tables = self._host_tables[turn]
        width = batch.page_tables.shape[1]
        tables[:count, :width] = batch.page_tables
        tables[count:size, 0] = self._padding_page * self._strides[0]
        inputs, at = self._send(turn, offsets, words, size, width), self._packed + 4 * offsets[-1]
        inputs = _divided(inputs, tuple(Division(0, room) for room in rooms))
        if self._states:
            inputs = replace(inputs, pieces_of_states=pieces_on_device(at, size, size, 0))
        return self._with_kinds(turn, inputs, batch, size)

    def _with_kinds(self, turn: int, inputs: StepInputs, batch: StepBatch, size: int) -> StepInputs:
        """Queue the copies of rows and tables of the other kinds, padded to `size` rows."""
        given = batch.further
        if not len(batch.slots):  # PADDING, whose tables are those of any kind
            given = (KindRows(batch.cache_rows, batch.page_tables),) * len(self._further)
        written = (
            buffers.write(turn, rows, size) for buffers, rows in zip(self._further, given, strict=True)
        )
        further = tuple(replace(inputs, cache_rows=rows, page_tables=tables) for rows, tables in written)
        return replace(inputs, further=further) if further else inputs

    def _send(self, turn: int, offsets: list[int], words: int, rows: int, width: int) -> StepInputs:
        self._device.copy_in(self._packed, self._host[turn][:words])
        pitch = 4 * self.table_width
        self._device.copy_rows_in(self._tables, pitch, self._host_tables[turn][:rows], 4 * width)
        tokens, slots, positions, cache_rows, starts, contexts, drawing, draws, tiles, pieces = (
            self._packed + 4 * offset for offset in offsets[:-1]
        )
        return StepInputs(
            self._tables,
            self.table_width,
            tokens,
            slots,
            positions,
            cache_rows,
            starts,
            contexts,
            drawing,
            draws,
            tiles,
            pieces,
        )


class _KindBuffers:
    """Rows and tables of a further kind of pages; `padding_page`: the entry that padding is written to."""

    def __init__(
        self, device: Device, bounds: StepBounds, *, rows: int, padding_page: int, depth: int
    ) -> None:
        self._device, self._padding, width = device, padding_page, bounds.table_width
        self._rows = device.allocate(4 * bounds.max_tokens, "a step's rows of pages")
        self._tables = device.allocate(4 * rows * width, "page tables")
        self._host_rows = [device.pinned(bounds.max_tokens, np.int32) for _ in range(depth)]
        self._host_tables = [device.pinned((rows, width), np.int32) for _ in range(depth)]

    def write(self, turn: int, given: KindRows, size: int) -> tuple[int, int]:
        """Queue the copies, padded to `size` rows; returns the addresses of rows and of tables."""
        rows, tables = self._host_rows[turn], self._host_tables[turn]
        count, width = given.page_tables.shape
        used = len(given.cache_rows)
        rows[:used], tables[:count, :width] = given.cache_rows, given.page_tables
        rows[used:size] = self._padding * PAGE
        tables[count:size, 0] = self._padding
        self._device.copy_in(self._rows, rows[: max(used, size, 1)])
        pitch = 4 * tables.shape[1]
        self._device.copy_rows_in(self._tables, pitch, tables[: max(count, size)], 4 * width)
        return self._rows, self._tables


def drawing_rows(batch: StepBatch, most: int) -> StepBatch | None:
    """The rows that draw as a step that draws nothing: each is a chunk of its own.

    None where they are none, or more than `most`, or some that were drawn come behind others.
    """
    rows = np.concatenate([batch.draws["row"], pooled_rows(batch.pools)]).astype(np.int32)
    chunks = np.searchsorted(batch.sequence_starts, rows, side="right") - 1
    drawn = int(np.count_nonzero(chunks < batch.drawn))
    if not 0 < len(rows) <= min(most, len(batch.tokens)) or (chunks[:drawn] >= batch.drawn).any():
        return None
    further = (KindRows(one.cache_rows[rows], one.page_tables[chunks]) for one in batch.further)
    return StepBatch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        cache_rows=batch.cache_rows[rows],
        sequence_starts=np.arange(len(rows) + 1, dtype=np.int32),
        context_lengths=batch.positions[rows] + 1,
        page_tables=batch.page_tables[chunks],
        slots=batch.slots[chunks],
        draws=_NO_DRAWS,
        drawn=drawn,
        further=tuple(further),
    )


def _divided(inputs: StepInputs, divisions: tuple[Division, ...]) -> StepInputs:
    """Inputs with the places of the tiles and pieces of all plans, which lie one behind the other."""
    places, tiles, pieces = [], inputs.tiles, inputs.pieces
    for one in divisions[:-1]:
        tiles, pieces = tiles + _TILE_BYTES * one.tiles, pieces + _PIECE_BYTES * one.pieces
        places.append((tiles, pieces))
    return replace(inputs, divisions=tuple(places)) if places else inputs


def padded_lengths(batch: StepBatch, size: int) -> IntArray:
    """Return the lengths of the contexts of a batch as `StepBuffers.write_padded` pads it."""
    lengths = np.ones(size, dtype=np.int32)
    lengths[: len(batch.context_lengths)] = batch.context_lengths
    return lengths


def _layout(
    tokens: int, sequences: int, draws: int, tiles: int, pieces: int, states: int
) -> tuple[list[int], int]:
    """Offsets of the arrays in `StepInputs`' order, but for the tables, and the words in all.

    The last are those of `states` pieces that go through states.
    """
    sizes = (
        *(tokens,) * 4, sequences + 1, sequences, draws, _DRAW_WORDS * draws, 2 * tiles, 4 * pieces,
        4 * states,
    )  # fmt: skip
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-max(size, 1) // _ALIGN) * _ALIGN
    return offsets, end
