"""Shapes of products, and the rules by which all kernels of a product give the same bits.

y (rows, outputs) = x (rows, inputs) times weight (outputs, inputs) transposed; x is elements, y elements or
float, sums float, all row-major. Also with SwiGLU or GeGLU, and added to the residual stream.

The number of rows is rounded up to one of few sizes, so that a way is chosen a bounded number of times: x and
y must have room for `padded_rows(rows)` rows. What the rows in between hold does not matter, and what is
written to them means nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix

__all__ = [
    "DEPTH",
    "GATED",
    "MANY_ROWS",
    "SUMMED",
    "Candidate",
    "Kernel",
    "Kind",
    "ProductLauncher",
    "Shape",
    "first_sum",
    "padded_rows",
]

MANY_ROWS = 1024  # above, shapes are too many to try each: they take what was best at the nearest size tried
DEPTH = 64  # elements of K in a stage of our kernels
_LONG, _MANY_OUTPUTS = 4096, 2048  # inputs from which sums are taken in two halves, and outputs up to which

Kernel = Callable[[Buffer, Matrix, Buffer], None]
"""Queues a product of one shape: x, weight, y."""


class Kind(Enum):
    """Use of a product's sums."""

    PLAIN = "product"  # elements
    FLOAT = "float"
    SWIGLU = "swiglu"  # the weight is gate rows, then up rows; the result their SwiGLU, elements
    GEGLU = "geglu"  # the same with GELU
    RESIDUAL = "residual"  # added to what is there, float
    ADDEND = "addend"  # the same sums, not added yet, float

    @property
    def activation(self) -> Activation | None:
        """Activation of the gate, if the weight has one."""
        return GATED.get(self)


SUMMED = (Kind.RESIDUAL, Kind.ADDEND)
"""Products that have two sums where `first_sum` says so."""
GATED = {Kind.SWIGLU: Activation.SILU, Kind.GEGLU: Activation.GELU}
"""Products that have the activation inside."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a product; `outputs` are those of y: with a gate half as many as the weight has rows.

    pitch  outputs from a row of y to the next, if y is some columns of a wider array; else None
    """

    rows: int
    outputs: int
    inputs: int
    kind: Kind
    format: Format = Format.F16
    pitch: int | None = None

    @property
    def title(self) -> str:
        """The product without its rows, for a person, as `swiglu 4,864 x 896, f16`."""
        return f"{self.kind.value} {self.outputs:,} x {self.inputs:,}, {self.format.value[0]}"


def _always(shape: Shape) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel for products of ours, or an algorithm of the library.

    name       for a person
    kernel     makes what computes a shape that it suits
    suits      whether it can compute another shape of the same kind, format, outputs and inputs
    algorithm  what tells an algorithm of the library from its others; empty for a kernel of ours
    """

    name: str
    kernel: Callable[[Shape], Kernel]
    suits: Callable[[Shape], bool] = _always
    algorithm: bytes = b""


class ProductLauncher(Protocol):
    """A family of kernels for products."""

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Return the candidates that are worth timing for a shape, the best guess first."""
        ...


def padded_rows(rows: int) -> int:
    """The number of rows that is computed for `rows`: steps of 8, then 32, then 128."""
    step = 1 if rows <= 16 else 8 if rows <= 256 else 32 if rows <= MANY_ROWS else 128
    return -(-rows // step) * step


def first_sum(outputs: int, inputs: int) -> int:
    """Return how many inputs the first sum of a product goes through that is added to something, on Hopper.

    All, unless they are many and outputs few: then there is a second sum, which is added after the first. Few
    rows, whose time is that of one product after the other, take half of it, and twice as many blocks share
    the work. With more outputs there are blocks enough, and a second addition only costs.
    """
    if inputs < _LONG or outputs >= _MANY_OUTPUTS:
        return inputs
    return -(-inputs // (2 * DEPTH)) * DEPTH
