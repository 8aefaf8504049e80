"""Matrices of a file to FP8, some rows at a time: dequantised to elements, then rounded, on the GPU."""

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Matrix
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer

__all__ = ["Rounder"]

_SCRATCH_BYTES = 64 << 20


class Rounder:
    """Queues tensors to be written as FP8, with a scale for each row, an output channel."""

    def __init__(self, device: Device, dequantizer: Dequantizer) -> None:
        self._device = device
        self._dequantizer = dequantizer
        self._quantise = Quantise(device)
        self._elements = device.allocate(_SCRATCH_BYTES, "weights to be rounded")

    def load(
        self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, matrix: Matrix, first: int, rows: int
    ) -> None:
        """Queue the tensor of `rows` rows with these bytes to be written from row `first` of a matrix on."""
        row_bytes, columns = len(raw) // rows, matrix.columns
        step = _SCRATCH_BYTES // (columns * ELEMENT.itemsize)
        for start in range(0, rows, step):
            count, row = min(step, rows - start), first + start
            part = raw[start * row_bytes : (start + count) * row_bytes]
            self._dequantizer.load(part, kind, self._elements, floats=False)
            numbers, scales = matrix.address + row * columns, matrix.scales + row * FLOAT.itemsize
            self._quantise(self._elements, numbers, scales, count, columns)

    def close(self) -> None:
        """Give the scratch memory back, when all that was queued is done."""
        self._device.synchronize()
        self._device.free(self._elements)
