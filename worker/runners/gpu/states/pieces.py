"""Divides a step into the pieces that go through states, on the host."""

from typing import NamedTuple

import numpy as np

from nightmill.jobs.errors import RunnerError
from nightmill.worker.runners.base import STATE_CHUNK, IntArray, StepBatch
from nightmill.worker.runners.gpu.states.operands import Pieces, StepPieces

__all__ = ["NO_STATE_PIECES", "StatePieces", "pieces_on_device", "state_pieces"]


class StatePieces(NamedTuple):
    """The pieces of a step: the first so many are `drawn`, those behind them of prompts.

    arrays        (4, pieces): their first rows, lengths, slots, and the positions of their first tokens
    prompt_rows   rows that those of prompts have
    """

    arrays: IntArray
    drawn: int
    prompt_rows: int

    @property
    def pieces(self) -> int:
        """All of them."""
        return len(self.arrays[0])


NO_STATE_PIECES = StatePieces(np.zeros((4, 0), dtype=np.int32), 0, 0)


def state_pieces(batch: StepBatch) -> StatePieces:
    """Divide a step: a chunk of a prompt is a piece, and so are the drawn tokens of a sequence together.

    Raises RunnerError where a piece of a prompt begins between two chunks of states.
    """
    starts, slots, drawn = batch.sequence_starts, batch.slots, batch.drawn
    begins = np.ones(len(slots), dtype=np.bool_)
    begins[1:drawn] = slots[1:drawn] != slots[: max(drawn - 1, 0)]
    firsts = np.flatnonzero(begins)
    first_rows = starts[firsts]
    positions = batch.positions[first_rows]
    count = int(np.count_nonzero(begins[:drawn]))
    between = np.flatnonzero(positions[count:] % STATE_CHUNK)
    if len(between):
        position = positions[count:][between[0]]
        raise RunnerError(
            f"a piece of a prompt begins at position {position}: models with states take pieces from "
            f"multiples of {STATE_CHUNK}"
        )
    lengths = np.diff(first_rows, append=starts[-1])
    arrays = np.stack([first_rows, lengths, slots[firsts], positions]).astype(np.int32)
    return StatePieces(arrays, count, int(starts[-1] - starts[drawn]))


def pieces_on_device(address: int, count: int, drawn: int, prompt_rows: int) -> StepPieces:
    """Return the operands of kernels for `count` pieces whose arrays are at an address."""

    def some(first: int, number: int, rows: int) -> Pieces:
        rows_at, lengths, slots, starts = (address + 4 * (count * array + first) for array in range(4))
        return Pieces(rows_at, lengths, slots, starts, number, rows)

    return StepPieces(prompts=some(drawn, count - drawn, prompt_rows), drawn=some(0, drawn, 0))
