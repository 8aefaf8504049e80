"""What launchers are given: matrices of weights, and buffers of activations and vectors."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

__all__ = ["ABSENT", "ELEMENT", "FLOAT", "INT", "Buffer", "Format", "Matrix"]

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)
ELEMENT = np.dtype("V2")
"""The device's element, half or bfloat16 (`Device.element`), which NumPy does not compute with."""


class Format(Enum):
    """How a matrix keeps its numbers: its name, and so many of them in a block of so many bytes.

    A matrix that is not quantised has the format of the device's element.
    """

    F16 = ("f16", 1, 2)
    BF16 = ("bf16", 1, 2)

    @property
    def plain(self) -> bool:
        """Whether its numbers are elements, as kernels without a format of their own take them."""
        return self in (Format.F16, Format.BF16)

    def bytes(self, rows: int, columns: int) -> int:
        """Of a matrix, without scales that are kept apart."""
        _, numbers, size = self.value
        return rows * (columns // numbers) * size


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that rows of activations are multiplied with, row-major (rows, columns).

    A product has `rows` outputs and `columns` inputs. `scales`: the address of what a format keeps apart, 0
    where it keeps nothing.
    """

    address: int
    rows: int
    columns: int
    format: Format = Format.F16
    scales: int = 0

    @property
    def bytes(self) -> int:
        """Without scales that are kept apart."""
        return self.format.bytes(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array on the device, row-major; one of activations has room for as many rows as a step may have."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def from_row(self, row: int) -> "Buffer":
        """Its rows from that one on."""
        below = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, address=self.address + row * below, shape=(self.shape[0] - row, *self.shape[1:]))


ABSENT = Buffer(0, (0,), FLOAT)
"""Stands for a vector that a model does not have: kernels take its address, 0, for that."""
