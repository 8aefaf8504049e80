"""The reference runner's states of layers that have them, and which tokens of a step go through which."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import NO_SNAPSHOT, STATE_CHUNK, StepBatch
from nightmill.worker.runners.reference.ops import FloatArray

__all__ = ["Flow", "ReferenceStates", "choose_slots", "flow_of"]

DEFAULT_BYTES = 2 << 30
RowArray = npt.NDArray[np.intp]


def choose_slots(spec: ModelSpec, sequences: int, memory: int = DEFAULT_BYTES) -> int:
    """Slots for so many sequences, or for as many as have states that fit into `memory` bytes.

    Each slot is counted with a snapshot. Raises RunnerError where not even one fits.
    """
    taken = 2 * spec.state_bytes
    if taken > memory:
        raise RunnerError(
            f"states were given {memory:,} bytes, but those of one sequence take {taken:,} with a snapshot"
        )
    return min(sequences, memory // taken) if taken else sequences


@dataclass(frozen=True, slots=True)
class Flow:
    """In which order a step's tokens go through the states of their slots: pieces of prompts first.

    pieces  of prompts: their tokens, and their slot
    rounds  tokens that were drawn, and their slots; in a round a slot has one token, the rounds are in order
    """

    pieces: list[tuple[slice, int]]
    rounds: list[tuple[RowArray, RowArray]]


def flow_of(batch: StepBatch) -> Flow:
    """Find that order. Raises RunnerError where a piece of a prompt begins between two chunks."""
    starts = batch.sequence_starts.tolist()
    slots = batch.slots.tolist()
    for index in range(batch.drawn, len(slots)):
        if (position := int(batch.positions[starts[index]])) % STATE_CHUNK:
            raise RunnerError(
                f"a piece of a prompt begins at position {position}: models with states take pieces from "
                f"multiples of {STATE_CHUNK}"
            )
    rounds: list[list[int]] = []
    taken = dict.fromkeys(slots, 0)
    for index in range(batch.drawn):
        turn = taken[slots[index]]
        taken[slots[index]] += 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(index)
    return Flow(
        [(slice(starts[index], starts[index + 1]), slots[index]) for index in range(batch.drawn, len(slots))],
        [
            (batch.sequence_starts[one].astype(np.intp), batch.slots[one].astype(np.intp))
            for one in map(np.array, rounds)
        ],
    )


class ReferenceStates:
    """For each layer the arrays of its state by name, (slots + snapshots, *shape) each, zeros at first."""

    def __init__(self, spec: ModelSpec, slots: int, snapshots: int) -> None:
        self._slots = slots
        self.layers: list[dict[str, FloatArray]] = [
            {
                array.name: np.zeros((slots + snapshots, *array.shape), dtype=array.type)
                for array in layer.state
            }
            for layer in spec.layers
        ]

    def begin(self, slot: int, snapshot: int = NO_SNAPSHOT) -> None:
        """Make the states of a slot those of a snapshot, or of a sequence without tokens."""
        if snapshot == NO_SNAPSHOT:
            self.clear(slot)
        else:
            self._copy(self._slots + snapshot, slot)

    def save(self, slot: int, snapshot: int) -> None:
        """Copy the states of a slot to a snapshot."""
        self._copy(slot, self._slots + snapshot)

    def _copy(self, source: int, target: int) -> None:
        for layer in self.layers:
            for array in layer.values():
                array[target] = array[source]

    def clear(self, slot: int) -> None:
        """Make the states of a slot those of a sequence without tokens."""
        self.fill(slot, 0.0)

    def fill(self, slot: int, value: float) -> None:
        """Fill the states of a slot; tests fill free ones with NaN."""
        for layer in self.layers:
            for array in layer.values():
                array[slot] = value

    def close(self) -> None:
        """Drop them all."""
        self.layers = []
