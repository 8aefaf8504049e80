"""Rows as FP8: E4M3 numbers, and a scale for each row, its largest magnitude over 448.

What a product over FP8 weights sees of these, a row for each output, and of what it multiplies them with, a
row for each token. Computed as the kernels do, to the same bits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.reference.fp8 import round_e4m3

__all__ = ["as_fp8", "to_fp8"]

FloatArray = npt.NDArray[np.floating[Any]]

_LARGEST = 448.0
_LEAST_SCALED = 1e-30  # what a row of less is taken for: 448 over it has to be a float


def to_fp8(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """E4M3 numbers of rows x (..., K), and scales (..., 1), all in its type."""
    kind = x.dtype.type
    largest = np.fmax.reduce(np.abs(x), axis=-1, keepdims=True, initial=kind(_LEAST_SCALED))
    return round_e4m3(x * (kind(_LARGEST) / largest)), largest / kind(_LARGEST)


def as_fp8(x: FloatArray) -> FloatArray:
    """Round x to FP8 and back: numbers times scales."""
    numbers, scales = to_fp8(x)
    result: FloatArray = numbers * scales
    return result
