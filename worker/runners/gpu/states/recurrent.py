"""Shared parts of launchers of recurrences token by token: blocks that take one head after the other."""

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.sources import Source

__all__ = ["Recurrent"]

_WARP = 32


class Recurrent:
    """Launches a kernel whose blocks have a head's matrix (rows, columns) in registers (`recurrent.cuh`).

    heads  that are shared out among blocks; turns: matrices that each of them stands for
    """

    def __init__(
        self,
        device: Device,
        source: Source,
        name: str,
        arguments: str,
        *,
        rows: int,
        columns: int,
        heads: int,
        turns: int = 1,
    ) -> None:
        warps = 16 if rows * columns > 128 * 128 else 8 if rows * columns >= 64 * 64 else 4
        together = _WARP // (columns // 4)  # rows of a warp, four columns a lane
        self._threads = _WARP * warps
        self._shared = rows // (warps * together) * self._threads * 16
        self._heads, self._turns = heads, turns
        self._most = max(16 // warps, 1) * device.multiprocessors
        # Blocks live on shared memory, whatever their number.
        self._kernel = KernelPairs(device, source).function(name, arguments, shared=self._shared).few

    def rounds(self, pieces: int) -> int:
        """Return how many matrices a block takes, one after the other."""
        return -(-pieces * self._heads // self._most) * self._turns

    def __call__(self, pieces: int, *arguments: int | float) -> None:
        """Queue it for so many pieces."""
        blocks = min(pieces * self._heads, self._most)
        self._kernel((blocks, 1), (self._threads, 1, 1), *arguments, shared=self._shared)
