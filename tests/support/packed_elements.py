"""What packed weights are as elements, in NumPy: what kernels are held to (`common/packed_numbers.cuh`).

In half, a scale that is quantised itself is rounded to half, and so is a minimum. An element is the number
times the scale, or that plus the minimum, rounded once. In bfloat16, and of types whose scales are halves in
the file and that have no minimum, an element is the nearest one to what `gguf` computes in float.

A scale's error is that of half, 2^-12 of it at most, common to the 16 or 32 weights that it belongs to: their
squared error by it is a ten-thousandth of what quantisation costs in Q4_K.
"""

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nightmill.worker.runners.gpu.device.element import Element
from tests.support.elements import as_words

__all__ = ["as_packed_words", "elements_of", "has_its_own"]

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Kind = GGMLQuantizationType


def as_packed_words(blocks: Bytes, kind: Kind, element: Element) -> npt.NDArray[np.uint16]:
    """The elements (blocks, weights of each) of blocks (blocks, bytes), in 16-bit words."""
    if has_its_own(kind, element):
        return elements_of(blocks, kind).view(np.uint16)
    return as_words(dequantize(blocks, kind), element)


def has_its_own(kind: Kind, element: Element) -> bool:
    """True if elements of a type are not the nearest ones to what `gguf` computes."""
    return element is Element.F16 and kind in _LINES | _SCALES


def elements_of(blocks: Bytes, kind: Kind) -> npt.NDArray[np.float16]:
    """The halves (blocks, weights of each) of blocks (blocks, bytes), where they are their own."""
    with np.errstate(over="ignore"):
        if kind in _LINES:
            numbers, scales, minima = _LINES[kind](blocks)
            groups = _grouped(numbers, scales)
            made = groups * _half(scales)[..., None] + _half(minima)[..., None]  # exact in float64
        else:
            numbers, scales = _SCALES[kind](blocks)
            made = _grouped(numbers, scales) * _half(scales)[..., None]
        return made.reshape(len(blocks), -1).astype(np.float16)


def _half(exact: Array) -> Array:
    """The nearest halves."""
    return exact.astype(np.float16).astype(np.float64)


def _grouped(numbers: Array, scales: Array) -> Array:
    """Numbers (blocks, weights) as (blocks, groups, weights of a group)."""
    return numbers.reshape(*scales.shape, -1)


def _halves(blocks: Bytes, offset: int) -> Array:
    """The half at an offset of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float64)


def _nibbles(data: Bytes, run: int) -> npt.NDArray[np.int64]:
    """The numbers of runs of bytes: the lower four bits of a run are its first ones, the upper its last."""
    runs = data.reshape(len(data), -1, 1, run)
    return (runs >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(len(data), -1).astype(np.int64)


def _two_bits(data: Bytes) -> npt.NDArray[np.int64]:
    """The numbers of 32 bytes at a time: 128, of which the first 32 have the lowest bits."""
    runs = data.reshape(len(data), -1, 1, 32)
    return (runs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(data), -1).astype(np.int64)


def _bits(data: Bytes) -> npt.NDArray[np.int64]:
    """The numbers of 32 bytes: 256, of which the first 32 have the lowest bits."""
    return (
        (data[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1)
        .reshape(len(data), -1)
        .astype(np.int64)
    )


def _fifth_bits(data: Bytes) -> npt.NDArray[np.int64]:
    """The numbers of 4 bytes: 32, from the lowest bit on."""
    return np.unpackbits(data, axis=1, bitorder="little").astype(np.int64)


def _six_bits(data: Bytes) -> tuple[Array, Array]:
    """Scales and minima (blocks, 8) of the 12 bytes of Q4_K and Q5_K."""
    low, middle, high = (data[:, i : i + 4].astype(np.int64) for i in (0, 4, 8))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales.astype(np.float64), minima.astype(np.float64)


def _of_q4_1(blocks: Bytes) -> tuple[Array, Array, Array]:
    return _nibbles(blocks[:, 4:], 16).astype(np.float64), _halves(blocks, 0), _halves(blocks, 2)


def _of_q5_1(blocks: Bytes) -> tuple[Array, Array, Array]:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]) << 4
    return numbers.astype(np.float64), _halves(blocks, 0), _halves(blocks, 2)


def _of_q4_k(blocks: Bytes) -> tuple[Array, Array, Array]:
    scales, minima = _six_bits(blocks[:, 4:16])
    numbers = _nibbles(blocks[:, 16:], 32).astype(np.float64)
    return numbers, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _of_q5_k(blocks: Bytes) -> tuple[Array, Array, Array]:
    scales, minima = _six_bits(blocks[:, 4:16])
    numbers = (_nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48]) << 4).astype(np.float64)
    return numbers, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _of_q2_k(blocks: Bytes) -> tuple[Array, Array, Array]:
    both = blocks[:, :16]
    scales, minima = (both & 15).astype(np.float64), (both >> 4).astype(np.float64)
    return (
        _two_bits(blocks[:, 16:80]).astype(np.float64),
        _halves(blocks, 80) * scales,
        -_halves(blocks, 82) * minima,
    )


def _of_q3_k(blocks: Bytes) -> tuple[Array, Array]:
    low, high = blocks[:, 96:104].astype(np.int64), blocks[:, 104:108].astype(np.int64)
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    scales |= np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1) << 4
    numbers = (_two_bits(blocks[:, 32:96]) | _bits(blocks[:, :32]) << 2) - 4
    return numbers.astype(np.float64), _halves(blocks, 108) * (scales - 32)


def _of_q6_k(blocks: Bytes) -> tuple[Array, Array]:
    numbers = (_nibbles(blocks[:, :128], 64) | _two_bits(blocks[:, 128:192]) << 4) - 32
    return numbers.astype(np.float64), _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)


_LINES = {
    Kind.Q4_1: _of_q4_1,
    Kind.Q5_1: _of_q5_1,
    Kind.Q2_K: _of_q2_k,
    Kind.Q4_K: _of_q4_k,
    Kind.Q5_K: _of_q5_k,
}
_SCALES = {Kind.Q3_K: _of_q3_k, Kind.Q6_K: _of_q6_k}
