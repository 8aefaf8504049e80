"""The weights of a router as elements: several parts of each, so that their sum is as good as float.

Experts are chosen by float logits. A half has 11 bits of precision, a bfloat16 8, a float 24; a weight is the
sum of as many elements as are needed for that, or nearly: of the first, and of what is left of it, some bits
further up, so that it stays a normal number. Rows of all first parts come first, filled up with rows of 0 to
a multiple of 8, then those of the second ones. So any product of elements gives the parts of logits, whose
sums are taken by who reads them (`cuda/experts/route.cu`).
"""

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.element import Element

__all__ = ["PARTS", "PART_SCALE", "part_rows", "router_parts", "router_rows"]

PARTS = 2
_BITS = 11  # of an element at most
PART_SCALE = 2.0**-_BITS
"""The factor by which the second part counts."""


def part_rows(rows: int) -> int:
    """Rows of one part of a router with so many rows."""
    return -(-rows // 8) * 8


def router_rows(rows: int) -> int:
    """Rows of all parts."""
    return PARTS * part_rows(rows)


def router_parts(weights: npt.NDArray[np.float32], element: Element) -> npt.NDArray[np.uint16]:
    """Words of elements (`router_rows`, columns) of float weights (rows, columns)."""
    rows, columns = weights.shape
    parts = np.zeros((PARTS, part_rows(rows), columns), dtype=np.uint16)
    left = weights.astype(np.float32)
    for part in parts:
        part[:rows] = _words(left, element)
        left = (left - _numbers(part[:rows], element)) * np.float32(1 / PART_SCALE)
    return parts.reshape(-1, columns)


def _words(numbers: npt.NDArray[np.float32], element: Element) -> npt.NDArray[np.uint16]:
    if element is Element.F16:
        return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _numbers(words: npt.NDArray[np.uint16], element: Element) -> npt.NDArray[np.float32]:
    if element is Element.F16:
        return np.ascontiguousarray(words).view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)
