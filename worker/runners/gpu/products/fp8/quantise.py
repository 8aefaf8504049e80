"""Rows of elements to FP8: what enters products with FP8 weights, and these weights as they are loaded."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["MOST_INPUTS", "Quantise"]

MOST_INPUTS = 65_536  # elements of a row
_KERNELS = {1: 256, 2: 256, 4: 1024, 8: 1024}
"""By the pieces of 8 elements that a thread has: the most threads."""


class Quantise:
    """Launches `quantise.cu`."""

    def __init__(self, device: Device) -> None:
        kernels = KernelPairs(device, source_of("quantise"))
        self._kernels = {pieces: kernels.function(f"quantise_{pieces}", "PPPi") for pieces in _KERNELS}

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("quantise")]

    def __call__(self, x: int, out: int, scales: int, rows: int, width: int) -> None:
        """Queue x (rows, width) elements -> out E4M3, scales (rows,) float; all are addresses."""
        if rows:
            chunks = width // 8  # of 8 elements
            pieces = next(count for count, threads in _KERNELS.items() if chunks <= count * threads)
            block = (-(-chunks // (32 * pieces)) * 32, 1, 1)
            self._kernels[pieces].of(rows)((rows, 1), block, x, out, scales, width)
