"""Numbers as a device's elements: NumPy knows half, bfloat16 is the upper two bytes of a float."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.kv_format import KvFormat

Array = npt.NDArray[Any]

BOTH_ELEMENTS = pytest.mark.parametrize("element", Element, ids=lambda element: element.value)
"""Of tests of the fixture `device`, in tests/gpu/conftest.py."""
ELEMENTS_AND_KV = pytest.mark.parametrize(
    ("element", "kv"),
    [(Element.F16, KvFormat.ELEMENT), (Element.BF16, KvFormat.ELEMENT), (Element.F16, KvFormat.FP8)],
    ids=["f16", "bf16", "f16, KV fp8"],
)
"""The same, of tests that write keys and values."""
PRECISION = {Element.F16: 2.0**-11, Element.BF16: 2.0**-8}
"""The largest relative error of rounding to nearest."""
ROUNDED_ONCE = {element: 4 * precision**2 for element, precision in PRECISION.items()}
"""Normalised squared error allowed to results that are rounded once: 12 times what rounding alone can make.

In half 9.5e-7; in bfloat16 6.1e-5, which is less, too, than a fault of one percent makes, 1e-4.
"""


def as_words(array: Array, element: Element) -> npt.NDArray[np.uint16]:
    """The array's numbers as elements, rounded to nearest even, in 16-bit words."""
    if element is Element.F16:
        return array.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def without_signs_of_zeros(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Words whose zeros are +0: the sign of some is not the file's in `packed.cuh`, and no sum sees it."""
    return np.where(words & 0x7FFF, words, np.uint16(0))


def from_words(words: npt.NDArray[np.uint16], element: Element) -> Array:
    """The numbers: half, or for bfloat16 float."""
    if element is Element.F16:
        return words.view(np.float16)
    return (words.astype(np.uint32) << 16).view(np.float32)


def rounded(array: Array, element: Element) -> Array:
    """The nearest numbers that are elements."""
    return from_words(as_words(array, element), element)
