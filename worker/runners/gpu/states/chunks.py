"""What launchers of chunked recurrences share: how a head's columns are shared out among blocks."""

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPair, KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source

__all__ = ["Chunked", "controls_of"]

_TOKENS = 64  # of a chunk (`STATE_CHUNK`)


class Chunked:
    """Launches the kernels of a file that take prompts through a recurrence, 64 tokens at a time.

    A block has some columns of a head's state: all, or `_narrow` of them where blocks would be few. Columns
    know nothing of each other, so that bits do not depend on it.
    """

    def __init__(
        self, device: Device, source: Source, name: str, arguments: str, *, keys: int, values: int,
        heads: int, solves: bool,
    ) -> None:  # fmt: skip
        self._shared = shared_bytes(keys, solves=solves)
        self._multiprocessors = device.multiprocessors
        self._heads = heads
        kernels = KernelPairs(device, source)
        self._kernels = [
            (columns, threads, kernels.function(f"{name}_{width}", arguments, shared=self._shared))
            for width, columns, threads in widths_of(values)
        ]
        self._values = values

    def __call__(self, pieces: int, *arguments: int) -> None:
        """Queue it for so many pieces."""
        columns, threads, kernel = self._chosen(pieces)
        kernel.many(
            (self._heads * self._values // columns, pieces), (threads, 1, 1), *arguments, shared=self._shared
        )

    def _chosen(self, pieces: int) -> tuple[int, int, KernelPair]:
        """The widest with which there is a block for each multiprocessor."""
        for columns, threads, kernel in self._kernels:
            if self._heads * self._values // columns * pieces >= self._multiprocessors:
                return columns, threads, kernel
        return self._kernels[-1]


def widths_of(values: int) -> list[tuple[str, int, int]]:
    """Names, columns and threads of the kernels for heads of so many columns, the widest first."""
    widths = [("wide", values, 32 * max(values // 16, 4))]
    if values % 32 == 0 and values > 32:
        widths.append(("narrow", 32, 256))
    return widths


def shared_bytes(keys: int, *, solves: bool) -> int:
    """Shared memory of a block, as `chunk.cuh` divides it."""
    operands = 2 * 2 * 2 * _TOKENS * (keys + 8)  # keys and queries, each in two parts of two bytes
    triangle = 2 * 2 * 10 * 16 * 16
    times = 4 * 4 * _TOKENS
    return operands + times + (2 * triangle + 4 * 4 * 16 * 17 if solves else triangle)


def controls_of(controls: Buffer) -> tuple[int, int]:
    """Address and stride of a row's floats that steer heads; 0 where there are none."""
    return controls.address, controls.shape[1] if controls.address else 0
