"""Numbers to blocks of Q4_K and Q6_K: the nearest ones, without the search for better scales of llama.cpp.

`gguf` reads these types and does not write them.
"""

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

__all__ = ["quantised"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantised(values: Floats, kind: GGMLQuantizationType) -> Bytes:
    """Blocks (count / 256, bytes) of so many values, a multiple of 256."""
    return _QUANTISERS[kind](values.reshape(-1, 256).astype(np.float64))


def _over(numbers: npt.NDArray[np.float64], scales: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Quotients; 0 where a scale is."""
    return np.divide(
        numbers, scales, out=np.zeros(np.broadcast_shapes(numbers.shape, scales.shape)), where=scales != 0
    )


def _halves(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Bytes]:
    """The nearest halves, and their bytes (count, 2)."""
    halves = numbers.astype("<f2")
    return halves.astype(np.float64), halves.reshape(-1, 1).view(np.uint8)


def _q4_k(values: npt.NDArray[np.float64]) -> Bytes:
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(axis=2), 0)
    d, d_bytes = _halves((groups.max(axis=2) - least).max(axis=1) / 15 / 63)
    m, m_bytes = _halves(-least.min(axis=1) / 63)
    scales = np.clip(np.rint(_over((groups.max(axis=2) - least) / 15, d[:, None])), 0, 63)
    minima = np.clip(np.rint(_over(-least, m[:, None])), 0, 63)
    shifted = groups + (m[:, None] * minima)[..., None]
    numbers = np.clip(np.rint(_over(shifted, (d[:, None] * scales)[..., None])), 0, 15).astype(np.uint8)
    s, t = scales.astype(np.uint8), minima.astype(np.uint8)
    first = [
        s[:, :4] | s[:, 4:] >> 4 << 6,
        t[:, :4] | t[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | (t[:, 4:] & 15) << 4,
    ]
    nibbles = (numbers[:, 0::2] | numbers[:, 1::2] << 4).reshape(len(values), 128)
    return np.concatenate([d_bytes, m_bytes, *first, nibbles], axis=1)


def _q6_k(values: npt.NDArray[np.float64]) -> Bytes:
    groups = values.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0]
    wanted = largest / -32
    d, d_bytes = _halves(np.abs(wanted).max(axis=1) / 127)
    scales = np.clip(np.rint(_over(wanted, d[:, None])), -127, 127)
    numbers = np.clip(np.rint(_over(groups, (d[:, None] * scales)[..., None])), -32, 31) + 32
    halves = numbers.astype(np.uint8).reshape(-1, 2, 4, 32)  # of a block; quarters of 32
    low = np.stack([halves[:, :, i] & 15 | (halves[:, :, i + 2] & 15) << 4 for i in (0, 1)], axis=2)
    high = np.zeros_like(halves[:, :, 0])
    for i in range(4):
        high |= halves[:, :, i] >> 4 << 2 * i
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8), d_bytes]
    return np.concatenate(parts, axis=1)


_QUANTISERS = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}
