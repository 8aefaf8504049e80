"""Keys and values as an FP8 cache keeps them: E4M3 numbers times a power of two for each token and KV head.

The power is the least with which no number is over 448, the largest of E4M3. As that has the same relative
precision at every size, a scale that is no power of two would be no better, and what is kept is exact in the
type of what came in.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["POWERS_OF_FLOAT", "POWERS_OF_HALF", "as_kept", "exponents_of", "round_e4m3"]

FloatArray = npt.NDArray[np.floating[Any]]

POWERS_OF_FLOAT, POWERS_OF_HALF = (-126, 119), (-14, 7)
"""Exponents of the least and the largest power of two, of bfloat16 and float, and of half."""

_LARGEST = 448.0
_LEAST_NORMAL = -6  # exponent, below which numbers are as far apart as there


def round_e4m3(x: FloatArray) -> FloatArray:
    """The nearest E4M3 numbers, even ones where two are as near; 448 for all that is larger.

    Open Compute Project, "8-bit floating point specification", 2023.
    """
    clipped = np.clip(x, -_LARGEST, _LARGEST)
    exponents = np.maximum(np.frexp(clipped)[1] - 1, _LEAST_NORMAL)
    nearest: FloatArray = np.ldexp(np.rint(np.ldexp(clipped, 3 - exponents)), exponents - 3)
    return nearest


def exponents_of(x: FloatArray, powers: tuple[int, int] = POWERS_OF_FLOAT) -> npt.NDArray[np.int32]:
    """Return the exponent (..., 1) of the power of two for each row of x (..., D).

    powers  exponents of the least and of the largest that there is
    """
    mantissas, exponents = np.frexp(np.abs(x).max(axis=-1, keepdims=True))  # mantissas from 0.5 up to 1
    # 448 is 0.875 * 2^9
    found: npt.NDArray[np.int32] = np.clip(exponents - 9 + (mantissas > 0.875), *powers).astype(np.int32)
    return found


def as_kept(x: FloatArray, powers: tuple[int, int] = POWERS_OF_FLOAT) -> FloatArray:
    """Round x (..., D) to FP8 and back; rows have a power of two in common.

    A row with a number that is infinite or NaN becomes NaN.
    """
    finite = np.isfinite(x).all(axis=-1, keepdims=True)
    rows = np.where(finite, x, 0)
    exponents = exponents_of(rows, powers)
    kept = np.ldexp(round_e4m3(np.ldexp(rows, -exponents)), exponents)
    return np.where(finite, kept, np.nan).astype(x.dtype)
