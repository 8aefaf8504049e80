"""Operands of launchers: matrices of weights, and buffers of activations and vectors."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

__all__ = [
    "ABSENT", "BYTE", "ELEMENT", "FLOAT", "FP8", "GROUP", "INT", "PANEL_ROWS", "Buffer", "Format", "Matrix",
]  # fmt: skip

FLOAT, INT, BYTE = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)
ELEMENT = np.dtype("V2")
"""The device's element, half or bfloat16 (`Device.element`), which NumPy does not compute with."""
FP8 = np.dtype("V1")
"""E4M3: 4 bits of exponent, 3 of mantissa, up to 448."""

PANEL_ROWS = 8
"""Rows of a matrix that packed formats keep together."""
GROUP = 32
"""Numbers of a row whose scale kernels find together."""


class Format(Enum):
    """Storage of a matrix: name, rows of a panel, numbers of a row in a packet, bytes of a packet.

    Last, bytes at most of what kernels compute of the scale of a GROUP, where that is quantised itself. One
    that is not quantised has the format of the element, each number by itself. Quantised ones are packed as
    `cuda/common/packed.cuh` says, under GGUF's names.
    """

    F16 = ("f16", 1, 1, 2, 0)
    BF16 = ("bf16", 1, 1, 2, 0)
    FP8 = ("fp8", 1, 1, 1, 0)
    """E4M3, with a float for each row, which its numbers are multiplied by."""
    Q8_0 = ("Q8_0", PANEL_ROWS, 64, 544, 0)
    Q6_K = ("Q6_K", PANEL_ROWS, 256, 1680, 8)
    Q5_K = ("Q5_K", PANEL_ROWS, 256, 1408, 8)
    Q4_K = ("Q4_K", PANEL_ROWS, 256, 1152, 8)
    Q3_K = ("Q3_K", PANEL_ROWS, 256, 880, 8)
    Q2_K = ("Q2_K", PANEL_ROWS, 256, 672, 16)
    Q5_1 = ("Q5_1", PANEL_ROWS, 64, 384, 0)
    Q5_0 = ("Q5_0", PANEL_ROWS, 64, 352, 0)
    Q4_1 = ("Q4_1", PANEL_ROWS, 64, 320, 0)
    Q4_0 = ("Q4_0", PANEL_ROWS, 64, 288, 0)
    IQ4_NL = ("IQ4_NL", PANEL_ROWS, 64, 288, 0)
    MXFP4 = ("MXFP4", PANEL_ROWS, 64, 272, 0)
    MIXED = ("mixed", 0, 0, 0, 0)
    """The format of a stack of matrices in different packed formats (`Matrix.parts`)."""

    @property
    def plain(self) -> bool:
        """True if its numbers are elements, as kernels without a format of their own take them."""
        return self in (Format.F16, Format.BF16)

    @property
    def packed(self) -> bool:
        """True if it is a format of `cuda/common/packed.cuh`."""
        return self.value[1] == PANEL_ROWS

    @property
    def step(self) -> int:
        """Inputs of a packet."""
        return self.value[2]

    @property
    def packet(self) -> int:
        """Bytes of a packet."""
        return self.value[3]

    @property
    def computed(self) -> int:
        """Bytes at most of what kernels compute of the scale of a GROUP; 0 where it is used as it is."""
        return self.value[4]

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, without scales that are stored apart; whole panels and packets."""
        _, panel, step, packet, _ = self.value
        return -(-rows // panel) * -(-columns // step) * packet

    def scale_bytes(self, rows: int) -> int:
        """Bytes of the scales of a matrix that are stored apart."""
        return rows * FLOAT.itemsize if self.scaled else 0

    @property
    def scaled(self) -> bool:
        """True if a float for each row, which its numbers are multiplied by, stands apart from them."""
        return self is Format.FP8


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that rows of activations are multiplied with, row-major (rows, columns).

    A product has `rows` outputs and `columns` inputs. `scales`: the address of what a format keeps apart, 0
    where it keeps nothing. `parts`: of a MIXED one, the matrices that it is a stack of, each somewhere else.
    """

    address: int
    rows: int
    columns: int
    format: Format = Format.F16
    scales: int = 0
    parts: tuple["Matrix", ...] = ()

    @property
    def formats(self) -> tuple[Format, ...]:
        """Its own, or those of its parts."""
        return tuple(part.format for part in self.parts) or (self.format,)

    @property
    def bytes(self) -> int:
        """Bytes of a matrix, without scales that are stored apart; whole panels and packets."""
        if self.parts:
            return sum(part.bytes for part in self.parts)
        return self.format.bytes(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array on the device, row-major; one of activations has room for as many rows as a step may have.

    scales  the address of a float for each row, where numbers are FP8
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scales: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def from_row(self, row: int) -> "Buffer":
        """Its rows from that one on."""
        below = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(
            self,
            address=self.address + row * below,
            shape=(self.shape[0] - row, *self.shape[1:]),
            scales=self.scales and self.scales + row * FLOAT.itemsize,
        )


ABSENT = Buffer(0, (0,), FLOAT)
"""Stands for a vector that a model does not have: kernels take its address, 0, for that."""
