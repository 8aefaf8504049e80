"""Sums of hidden states, which become embeddings: kept for each slot on the device, told once complete."""

import numpy as np

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import PoolArray, SumArray
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["PooledSums"]

_WORDS = 5  # of a pool: the first row, how many, slot, whether the sum begins, its place among the complete
_BLOCK = 256
_SUM = np.dtype(np.float32)


class PooledSums:
    """Launches `pooling.cu`. `turn`, as everywhere, is a staging buffer whose earlier copies are done."""

    def __init__(self, device: Device, spec: ModelSpec, *, slots: int, depth: int) -> None:
        self._device = device
        self._width = spec.width
        self._pool = KernelPairs(device, source_of("pooling")).function("pool_rows", "PPPPi")
        row = spec.width * _SUM.itemsize
        self._sums = device.allocate(slots * row, "sums of hidden states")
        self._pools = device.allocate(slots * _WORDS * 4, "which hidden states are added")
        self._staged = [device.pinned((slots, _WORDS), np.int32) for _ in range(depth)]
        self._told = [device.pinned((slots, spec.width), _SUM) for _ in range(depth)]

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("pooling")]

    @staticmethod
    def bytes(slots: int, width: int) -> int:
        """Device memory that the sums take, with all that belongs to them."""
        return slots * (width * _SUM.itemsize + 4 * _WORDS) + 1024

    def add(self, turn: int, pools: PoolArray, x: Buffer, first: int, complete: Buffer) -> None:
        """Queue the addition of rows of x (R, width) elements, which the pools share out from `first` on.

        complete  gets the sums that are: float (E, width)
        """
        if not len(pools):
            return
        staged = self._staged[turn][: len(pools)]
        staged[:, 0] = first + np.cumsum(pools["rows"]) - pools["rows"]
        for place, name in enumerate(("rows", "slot", "begins"), 1):
            staged[:, place] = pools[name]
        staged[:, 4] = np.where(pools["ends"] != 0, np.cumsum(pools["ends"]) - 1, -1)
        self._device.copy_in(self._pools, staged)
        grid = (-(-self._width // _BLOCK), len(pools))
        self._pool.of(int(pools["rows"].sum()))(
            grid, (_BLOCK, 1, 1), x.address, self._pools, self._sums, complete.address, self._width
        )

    def tell(self, turn: int, count: int, complete: Buffer) -> None:
        """Queue the copy of the sums that the newest step completed."""
        if count:
            self._device.copy_out(self._told[turn][:count], complete.address)

    def told(self, turn: int, count: int) -> SumArray | None:
        """The sums that were copied for a step that is over."""
        return self._told[turn][:count].astype(np.float64) if count else None
