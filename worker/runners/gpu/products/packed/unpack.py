"""Products with packed weights through elements: a matrix is dequantised, then multiplied as any other.

So they have the bits of products over elements, for every format, shape, number of rows and GPU; other ways
to multiply packed weights are held against this one. With many rows it is fast, too: what it adds is the
time in which a matrix is written once.

The room for elements holds the largest matrix of a layer. The LM head, several times as large, goes through
it in pieces.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.gpu.device.device import CudaError, Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.shapes import Candidate, Kernel, Kind, Shape
from nightmill.worker.runners.gpu.weights.layout import (
    OF_EXPERTS,
    all_weights,
    formats_in,
    runs_of,
)

__all__ = ["Unpacked"]

_PIECE = 512  # inputs that a block goes through panels with
_BLOCKS = 16  # on a multiprocessor: twice as many as run at once
_LEAST = 16 << 20  # bytes, for pieces of the LM head if all layers are small


class Unpacked:
    """Launches `unpack.cu`, and then what multiplies elements.

    size      bytes of room for elements, as `workspace` says
    elements  ways to compute a product over elements
    """

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        formats = formats_in(spec, precision, but=OF_EXPERTS)
        return [source_of("unpack")] if any(format_.packed for format_ in formats) else []

    @staticmethod
    def workspace(spec: ModelSpec, precision: Precision) -> int:
        """Bytes of device memory that it takes; 0 if all matrices are elements."""
        sizes = [
            _LEAST
            if role in (Role.EMBEDDING, Role.HEAD)
            else weight.shape[0] * weight.shape[1] * ELEMENT.itemsize
            for role, weight in all_weights(spec)
            if weight.is_matrix
            and role not in OF_EXPERTS
            and any(run.format.packed for run in runs_of(spec, role, weight, precision))
        ]
        return max(sizes, default=0)

    def __init__(self, device: Device, size: int, elements: Callable[[Shape], list[Candidate]]) -> None:
        self._room = device.allocate(size, "a matrix of elements")
        self._size = size
        self._elements = elements
        self._format = device.element.format
        self._blocks = _BLOCKS * device.multiprocessors
        self._module = Module.of(device, source_of("unpack"))
        self._functions: dict[Format, Function] = {}

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Return a candidate for each kernel that multiplies elements."""
        if not shape.format.packed and shape.format is not Format.MIXED:
            return []
        first, *others = self._pieces(shape)
        return [self.through(one) for one in self._elements(first) if all(map(one.suits, others))]

    def through(self, one: Candidate) -> Candidate:
        """Make a candidate of one that multiplies elements: the matrix becomes elements first."""
        return replace(
            one,
            name=f"elements, {one.name}",
            kernel=partial(self._kernel, one),
            suits=partial(self._suits, one),
        )

    def first_piece(self, shape: Shape) -> Shape:
        """The product over elements, or the first of several, that a product is."""
        return self._pieces(shape)[0]

    def unpack(self, matrix: Matrix) -> Matrix:
        """Queue the matrix to become elements in the room, and return it as such."""
        address = self._room
        for part in matrix.parts or (matrix,):
            pieces, panels = -(-part.columns // _PIECE), -(-part.rows // PANEL_ROWS)
            self._function(part.format)(
                (pieces, min(panels, max(1, self._blocks // pieces))), (256, 1, 1), part.address, address,
                part.rows, part.columns,
            )  # fmt: skip
            address += self._format.bytes(part.rows, part.columns)
        return Matrix(self._room, matrix.rows, matrix.columns, self._format)

    def _suits(self, one: Candidate, shape: Shape) -> bool:
        return all(map(one.suits, self._pieces(shape)))

    def _pieces(self, shape: Shape) -> list[Shape]:
        """The products over elements that a product is: several, each with some outputs, only for logits."""
        whole = replace(shape, format=self._format)
        rows = shape.outputs if shape.kind.activation is None else 2 * shape.outputs
        most = self._size // (shape.inputs * ELEMENT.itemsize)
        if rows <= most:
            return [whole]
        most = most // PANEL_ROWS * PANEL_ROWS
        if shape.kind is not Kind.FLOAT or most == 0:
            raise CudaError(f"{self._size:,} bytes are too few to dequantise the weights of {shape}")
        sizes = [min(most, rows - first) for first in range(0, rows, most)]
        return [replace(whole, outputs=size, pitch=rows) for size in sizes]

    def _kernel(self, one: Candidate, shape: Shape) -> Kernel:
        pieces = self._pieces(shape)
        kernels = [(piece.outputs, one.kernel(piece)) for piece in pieces]
        if len(kernels) == 1:
            ((_, only),) = kernels
            return lambda x, weight, y: only(x, self.unpack(weight), y)

        def in_pieces(x: Buffer, weight: Matrix, y: Buffer) -> None:
            first, format_ = 0, weight.format
            for rows, kernel in kernels:
                place = weight.address + format_.bytes(first, weight.columns)
                piece = Matrix(place, rows, weight.columns, format_)
                results = replace(y, address=y.address + first * FLOAT.itemsize)
                kernel(x, self.unpack(piece), results)
                first += rows

        return in_pieces

    def _function(self, format_: Format) -> Function:
        if format_ not in self._functions:
            self._functions[format_] = self._module.function(f"unpack_{format_.name}", "PPii", dependent=True)
        return self._functions[format_]
