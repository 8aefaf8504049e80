"""Weights of any size without a file: the bytes of a tensor go round in a pool that lies on the GPU."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Format, Matrix
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from tests.support.blocks import random_blocks
from tests.support.elements import from_words
from tests.support.packed_elements import as_packed_words, has_its_own

__all__ = ["ResidentWeights"]

_ALIGNMENT = 16  # blocks, so that parts begin at multiples of 16 bytes, as uploaded ones do
_PERIOD = 4001  # times that; a prime, so that a tile never meets the rows of another
_PART_BYTES = 48 << 20
_GUARD = 64 << 10  # bytes of NaN behind a matrix


class ResidentWeights:
    """Tensors of one GGUF type, in place of what `Staging` uploads: their parts are in the pool already."""

    def __init__(self, device: Device, kept: Format) -> None:
        self._device, self.kept = device, kept
        self.kind = GGMLQuantizationType[kept.name]
        self._block, self._size = GGML_QUANT_SIZES[self.kind]
        self._pool = random_blocks(self.kind, _ALIGNMENT * _PERIOD).reshape(-1)
        self._period = len(self._pool)
        self._words: npt.NDArray[np.uint16] | None = None  # of the pool's elements, where NumPy makes them
        copies = -(-_PART_BYTES // self._period) + 1
        self._base = device.upload(np.tile(self._pool, copies), "a pool of blocks")

    def parts(self, raw: npt.NDArray[np.uint8], unit: int) -> Iterator[tuple[int, int, int]]:
        """As `Staging.parts`; of `raw` only the length counts."""
        unit *= _ALIGNMENT
        step = _PART_BYTES // unit * unit
        for start in range(0, len(raw), step):
            yield self._base + start % self._period, start, min(step, len(raw) - start)

    def packed(self, rows: int, columns: int) -> Matrix:
        """A tensor as packed matrix, with NaN behind it."""
        matrix = Matrix(0, rows, columns, self.kept)
        address = self._device.allocate(matrix.bytes + _GUARD)
        matrix = Matrix(address, rows, columns, self.kept)
        self._device.fill(address, 0xFF, matrix.bytes + _GUARD)
        repacker = Repacker(self._device, self)  # type: ignore[arg-type]
        repacker.clear(matrix, rows)
        repacker.load(self._length(rows, columns), matrix, 0)
        assert repacker.fits()
        repacker.close()
        return matrix

    def dequantise(self, rows: int, columns: int, address: int) -> None:
        """The same tensor as elements, by kernels that know nothing of packed ones, or by NumPy."""
        if has_its_own(self.kind, self._device.element):
            self._repeat(rows * columns, address)
            return
        dequantizer = Dequantizer(self._device, self)  # type: ignore[arg-type]
        dequantizer.load(self._length(rows, columns), self.kind, address, floats=False)
        assert dequantizer.fits()
        dequantizer.close()

    def row(self, index: int, columns: int) -> npt.NDArray[np.float64]:
        """A row of it, by NumPy: the numbers of its elements."""
        size = columns // self._block * self._size
        places = (index * size + np.arange(size)) % self._period
        blocks = self._pool[places].reshape(-1, self._size)
        words = as_packed_words(blocks, self.kind, self._device.element)
        return from_words(words, self._device.element).reshape(-1).astype(np.float64)

    def _repeat(self, count: int, address: int) -> None:
        """Elements of the pool, again and again, as bytes of it are in a tensor."""
        if self._words is None:
            blocks = self._pool.reshape(-1, self._size)
            self._words = as_packed_words(blocks, self.kind, self._device.element).reshape(-1)
        for first in range(0, count, len(self._words)):
            self._device.copy_in(address + first * self._words.itemsize, self._words[: count - first])
        self._device.synchronize()

    def _length(self, rows: int, columns: int) -> npt.NDArray[np.uint8]:
        return np.broadcast_to(np.zeros(1, dtype=np.uint8), (rows * columns // self._block * self._size,))
