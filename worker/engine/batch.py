"""Turns a plan into the flat arrays that a runner takes."""

import numpy as np

from worker.engine.request import Sequence
from worker.engine.scheduler import StepPlan
from worker.runners.base import FROM_SLOT, Admission, IntArray, StepBatch


class BatchBuilder:
    """Keeps the block tables of all slots as one array, so that a step copies rows of it.

    slots: sequences at once; pages: the most pages a sequence may have; block_size: tokens in a page.
    """

    def __init__(self, *, slots: int, pages: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.full((slots, pages), -1, dtype=np.int32)
        self._filled = [0] * slots

    def build(self, plan: StepPlan) -> tuple[StepBatch, list[Sequence]]:
        """Return the arrays of `plan` and the sequences that draw a token, in the order of `sample_slots`."""
        for sequence in plan.admitted:
            slot = _slot(sequence)
            self._tables[slot] = -1
            self._filled[slot] = 0
        tokens: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        drawing: list[Sequence] = []
        sample_rows: list[int] = []
        widest = 1
        for chunk in plan.chunks:
            sequence, start, length = chunk.sequence, chunk.start, chunk.length
            slot = _slot(sequence)
            pages = sequence.block_table
            if (filled := self._filled[slot]) < len(pages):
                self._tables[slot, filled : len(pages)] = pages[filled:]
                self._filled[slot] = len(pages)
            widest = max(widest, len(pages))
            slots.append(slot)
            starts.append(start)
            lengths.append(length)
            known = sequence.tokens[start : start + length]
            tokens += known
            if len(known) < length:
                tokens.append(FROM_SLOT)
            if start + length == len(sequence.tokens) + sequence.drawing:
                drawing.append(sequence)
                sample_rows.append(len(tokens) - 1)
        slot_array = np.array(slots, dtype=np.int32)
        start_array = np.array(starts, dtype=np.int32)
        length_array = np.array(lengths, dtype=np.int32)
        sequence_starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(length_array, out=sequence_starts[1:])
        positions = np.arange(len(tokens), dtype=np.int32)
        positions += np.repeat(start_array - sequence_starts[:-1], length_array)
        return StepBatch(
            tokens=np.array(tokens, dtype=np.int32),
            positions=positions,
            cache_rows=self._cache_rows(np.repeat(slot_array, length_array), positions),
            sequence_starts=sequence_starts,
            context_lengths=start_array + length_array,
            block_tables=self._tables[slot_array, :widest],
            slots=slot_array,
            sample_rows=np.array(sample_rows, dtype=np.int32),
            sample_slots=np.array([_slot(sequence) for sequence in drawing], dtype=np.int32),
            admissions=tuple(_admission(sequence) for sequence in plan.admitted),
        ), drawing

    def _cache_rows(self, slots: IntArray, positions: IntArray) -> IntArray:
        rows: IntArray = self._tables[slots, positions // self._block_size] * self._block_size
        return rows + positions % self._block_size


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a sequence without a slot was planned"
    return sequence.slot


def _admission(sequence: Sequence) -> Admission:
    request = sequence.request
    return Admission(_slot(sequence), tuple(sequence.tokens), request.params, request.seed)
