"""Results of products, compared on the GPU: launches `results.cu`."""

from pathlib import Path

import numpy as np

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT

__all__ = ["ResultsOnGpu"]

SOURCE = Path(__file__).with_name("results.cu"), ()
_BLOCKS, _THREADS = 1024, (256, 1, 1)
_NONE = np.array([0, -1], dtype=np.int64).view(np.uint64)
POISON = 0xFFFF_FFFF
"""A word of NaN, whether floats or elements are in it."""


class ResultsOnGpu:
    """Counts wrong results."""

    def __init__(self, device: Device) -> None:
        self._device = device
        module = Module.of(device, SOURCE)
        self._other_bits = module.function("other_bits", "PPqP")
        self._unlike = module.function("unlike", "PIqP")
        self._far = {
            FLOAT: module.function("far_floats", "PPqffP"),
            ELEMENT: module.function("far_halves", "PPqffP"),
        }
        self._none = device.upload(_NONE)
        self._found = device.upload(_NONE)

    def other_bits(self, found: int, expected: int, size: int) -> tuple[int, int]:
        """How many of so many bytes' words differ, and the place of the first."""
        return self._counted(self._other_bits, found, expected, size // 4)

    def not_poison(self, address: int, size: int) -> tuple[int, int]:
        """How many of so many bytes' words were written."""
        return self._counted(self._unlike, address, POISON, size // 4)

    def far(
        self, found: int, expected: int, dtype: "np.dtype[np.void] | np.dtype[np.float32]", count: int,
        absolute: float, relative: float,
    ) -> tuple[int, int]:  # fmt: skip
        """How many numbers are further from what is expected than that."""
        return self._counted(self._far[dtype], found, expected, count, absolute, relative)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on the device."""
        if size:
            self._device._cuda.memcpy_dtod_async(target, source, size, self._device.stream)

    def _counted(self, function, *arguments) -> tuple[int, int]:  # type: ignore[no-untyped-def]
        self.copy(self._found, self._none, 16)
        function((_BLOCKS, 1), _THREADS, *arguments, self._found)
        count, place = self._device.download(self._found, 2, np.uint64)
        return int(count), int(place)
