"""The states of all slots on the GPU, and copies of them: snapshots.

For each array of a layer's state there is one of all slots, and of all snapshots behind these. Nothing is
cleared where a sequence takes a slot: kernels take the state of a piece at position 0 for zeros.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import NO_SNAPSHOT, StepBatch
from nightmill.worker.runners.gpu.device.arena import Arena, aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.operands import LayerStates

__all__ = ["NO_STATES", "States"]

NO_STATES = LayerStates(0)
"""Stands for the states of a layer without any."""

_BLOCKS = 32  # of a copy of an array


class States:
    """The arrays of all layers, on the device; launches `copy_states.cu`.

    slots, snapshots  places: sequences, and copies
    depth             steps that may be outstanding
    """

    def __init__(self, device: Device, spec: ModelSpec, *, slots: int, snapshots: int, depth: int) -> None:
        self._device, self._slots = device, slots
        self.layers: list[LayerStates] = []
        """Addresses for kernels, by layer."""
        self.arrays: list[tuple[int, int]] = []
        """The address of each array, and the bytes of a place."""
        if not spec.state_bytes:
            self.layers = [NO_STATES] * len(spec.layers)
            return
        places, most = slots + snapshots, _most_pairs(slots, snapshots)
        arena = Arena(device, self.bytes(spec, slots, snapshots), "states of sequences")
        for layer in spec.layers:
            own = {array.name: arena.take(places * array.bytes) for array in layer.state}
            self.arrays += [(own[array.name], array.bytes) for array in layer.state]
            self.layers.append(LayerStates(**own) if own else NO_STATES)
        self._pairs = arena.take(_PAIR_BYTES * most)
        self._described = arena.take(_ARRAY_BYTES * len(self.arrays))
        described = device.pinned((len(self.arrays), 2), np.int64)
        described[:] = self.arrays
        device.copy_in(self._described, described)
        device.synchronize()
        self._staging = [[device.pinned((most, 2), np.int32) for _ in range(2)] for _ in range(depth)]
        self._copy = Module.of(device, source_of("copy_states")).function("copy_states", "PP", dependent=True)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("copy_states")] if spec.state_bytes else []

    @staticmethod
    def bytes(spec: ModelSpec, slots: int, snapshots: int) -> int:
        """Bytes of device memory that they take."""
        places, arrays = slots + snapshots, [array for layer in spec.layers for array in layer.state]
        if not arrays:
            return 0
        tables = _PAIR_BYTES * _most_pairs(slots, snapshots), _ARRAY_BYTES * len(arrays)
        return sum(aligned(places * array.bytes) for array in arrays) + sum(map(aligned, tables))

    def begin(self, batch: StepBatch, turn: int) -> None:
        """Queue the copies before a step: what sequences begin as, what slots take back, and what is kept.

        turn  names buffers whose earlier copies are done
        """
        begun = [(one.slot, one.snapshot) for one in batch.admissions if one.snapshot != NO_SNAPSHOT]
        places = [(self._slots + snapshot, slot) for slot, snapshot in [*begun, *batch.restores]]
        places += [(slot, self._slots + snapshot) for slot, snapshot in batch.keeps]
        self._queue(places, turn, 0)

    def save(self, snapshots: Sequence[tuple[int, int]], turn: int) -> None:
        """Queue the states of slots to be copied to snapshots: pairs of a slot and the number of one."""
        self._queue(((slot, self._slots + number) for slot, number in snapshots), turn, 1)

    def _queue(self, pairs: Iterable[tuple[int, int]], turn: int, which: int) -> None:
        """Queue copies from one place to another, of all arrays."""
        known = list(pairs)
        if not known:
            return
        staged = self._staging[turn][which][: len(known)]
        staged[:] = known
        self._device.copy_in(self._pairs, staged)
        self._copy((_BLOCKS, len(self.arrays), len(known)), (256, 1, 1), self._described, self._pairs)


_PAIR_BYTES, _ARRAY_BYTES = 8, 16


def _most_pairs(slots: int, snapshots: int) -> int:
    """Copies of a step: what takes a slot, or what becomes a snapshot."""
    return max(slots, snapshots)
