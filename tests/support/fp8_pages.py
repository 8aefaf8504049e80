"""The pages of an FP8 cache, byte by byte, as `cuda/common/kv_cache.cuh` says."""

from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.reference.fp8 import (
    POWERS_OF_FLOAT,
    POWERS_OF_HALF,
    as_kept,
    exponents_of,
    round_e4m3,
)
from tests.support.elements import rounded

Array = npt.NDArray[Any]
POWERS = {Element.F16: POWERS_OF_HALF, Element.BF16: POWERS_OF_FLOAT}
BIAS = {Element.F16: 15, Element.BF16: 127}
NOT_NUMBERS = {Element.F16: 31, Element.BF16: 255}
"""The exponent of tokens whose numbers are infinite or NaN."""

_BYTES = np.arange(128)
VALUES = np.where(_BYTES < 8, _BYTES * 2.0**-9, (1 + _BYTES % 8 / 8) * 2.0 ** (_BYTES // 8 - 7))
"""What the bytes from 0 to 126 stand for; 127 is NaN."""
_PLACES = np.array([token % 8 // 2 * 4 + token // 8 * 2 + token % 2 for token in range(PAGE)])


def kept_by(rows: Array, element: Element) -> Array:
    """What a cache of that element gives back of rows (..., D)."""
    return as_kept(rounded(rows, element).astype(np.float64), POWERS[element])


def as_parts(pages: Array, element: Element) -> npt.NDArray[np.uint8]:
    """Bytes (pages, kv_heads, PAGE * (D + 1)) of pages (pages, kv_heads, PAGE, D).

    Of rows that are NaN, everything is the worst that it can be.
    """
    finite = np.isfinite(pages).all(axis=-1, keepdims=True)
    rows = np.where(finite, pages, 0).astype(np.float64)
    exponents = exponents_of(rows, POWERS[element])
    numbers = round_e4m3(np.ldexp(rows, -exponents))
    codes = np.searchsorted(VALUES[:127], np.abs(numbers)) | np.where(np.signbit(numbers), 0x80, 0)
    codes = np.where(finite, codes, 0x7F).reshape(*pages.shape[:2], -1)
    biased = np.where(finite, exponents + BIAS[element], NOT_NUMBERS[element])[..., 0]
    placed = np.empty_like(biased)
    placed[..., _PLACES] = biased
    return np.concatenate([codes, placed], axis=-1).astype(np.uint8)


def from_parts(parts: npt.NDArray[np.uint8], head_dim: int, element: Element) -> Array:
    """The numbers (pages, kv_heads, PAGE, D) that bytes stand for; NaN of tokens that have none."""
    codes = parts[..., : PAGE * head_dim].reshape(*parts.shape[:2], PAGE, head_dim)
    exponents = parts[..., PAGE * head_dim :][..., _PLACES, None].astype(np.int32)
    numbers = np.where(codes & 0x80, -1.0, 1.0) * np.append(VALUES[:127], np.nan)[codes & 0x7F]
    result = np.ldexp(numbers, exponents - BIAS[element])
    return np.where(exponents == NOT_NUMBERS[element], np.nan, result)
