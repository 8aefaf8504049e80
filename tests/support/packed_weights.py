"""Random packed weights: bytes of a file, the elements that they are, and a matrix of them on the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format, Matrix
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from nightmill.worker.runners.gpu.weights.staging import Staging
from tests.support.blocks import random_blocks
from tests.support.elements import from_words
from tests.support.packed_elements import as_packed_words

__all__ = ["packed", "weights_of"]

Array = npt.NDArray[np.float32]


def weights_of(
    kept: Format, rows: int, columns: int, element: Element = Element.F16
) -> tuple[npt.NDArray[np.uint8], Array]:
    """Random rows as bytes of a file, and the elements that they are, as floats."""
    kind = GGMLQuantizationType[kept.name]
    block, _ = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, rows * columns // block)
    if kept is Format.MXFP4:  # exponents with which numbers are halves, normal or not, and 0
        blocks[:, 0] = np.where(blocks[:, 0] % 16, 95 + blocks[:, 0] % 34, 0)
    words = as_packed_words(blocks, kind, element).reshape(rows, columns)
    return blocks.reshape(rows, -1), from_words(words, element).astype(np.float32)


def packed(
    device: Device, kept: Format, raw: npt.NDArray[np.uint8], columns: int, parts: Sequence[int] = (),
    more: int = 0,
) -> Matrix:  # fmt: skip
    """The rows in a matrix, in memory full of NaN before; loaded from tensors of so many rows.

    more  rows of the matrix behind them
    """
    rows = len(raw) + more
    matrix = Matrix(device.allocate(kept.bytes(rows, columns)), rows, columns, kept)
    device.fill(matrix.address, 0xFF, matrix.bytes)
    staging = Staging(device, raw.shape[1] * 5)  # so small that a tensor takes several turns
    repacker = Repacker(device, staging)
    repacker.clear(matrix, len(raw))
    first = 0
    for rows in parts or [len(raw)]:
        repacker.load(raw[first : first + rows].reshape(-1), matrix, first)
        first += rows
    assert repacker.fits()
    staging.close()
    repacker.close()
    return matrix
