"""Products of few rows with packed weights by `packed_rows.cu`, on GPUs that have no faster kernels."""

from collections.abc import Collection
from functools import partial

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, Kernel, Kind, Shape
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in

__all__ = ["RESULTS", "PackedRows", "packed_formats"]

_WARPS = 4
_DEPTH, _PITCH = 256, 528  # inputs of a step, and bytes that a row of x has of them in shared memory
_TILES = (1, 2, 4)  # of 16 rows
RESULTS = {Kind.FLOAT: "floats", Kind.ADDEND: "floats", Kind.RESIDUAL: "added"}
"""Kernels by what becomes of a product; the others have elements."""


class PackedRows:
    """Launches `packed_rows.cu` for matrices of these formats.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    """

    def __init__(
        self, device: Device, formats: Collection[Format], activate: Activate, gate_up: Buffer
    ) -> None:
        self._activate, self._gate_up = activate, gate_up
        modules = {format_: Module.of(device, _source(format_)) for format_ in formats}
        self._kernels = {
            (format_, name, tiles): module.function(
                f"packed_{name}_{tiles}", "PPPiiii", shared=_shared(format_, tiles), dependent=True
            )
            for format_, module in modules.items()
            for name in ("elements", "floats", "added")
            for tiles in _TILES
        }

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files: one for each format."""
        return [_source(format_) for format_ in packed_formats(spec, precision, hopper=hopper)]

    def candidates(self, shape: Shape) -> list[Candidate]:
        """The kernel for so many rows."""
        packed = shape.format.packed or shape.format is Format.MIXED
        tiles = next((tiles for tiles in _TILES if shape.rows <= 16 * tiles), None)
        if not packed or tiles is None:
            return []
        return [
            Candidate(f"packed rows {tiles}", partial(self.kernel, tiles), lambda to: to.rows <= 16 * tiles)
        ]

    def kernel(self, tiles: int, shape: Shape) -> Kernel:
        """Bind the kernel of so many tiles to a shape of no more rows."""
        rows, activation = shape.rows, shape.kind.activation
        pitch = shape.pitch or shape.outputs
        if activation is None:
            return lambda x, weight, y: self._product(tiles, shape.kind, x, weight, y.address, rows, pitch)
        activate, gate_up = self._activate, self._gate_up

        def two_kernels(x: Buffer, weight: Matrix, y: Buffer) -> None:
            self._product(tiles, shape.kind, x, weight, gate_up.address, rows, weight.rows)
            activate(gate_up, y, rows, activation)

        return two_kernels

    def _product(
        self, tiles: int, kind: Kind, x: Buffer, weight: Matrix, y: int, rows: int, pitch: int
    ) -> None:
        """Queue the product, with rows of results that are `pitch` numbers apart."""
        name = RESULTS.get(kind, "elements")
        size = (FLOAT if name in RESULTS.values() else ELEMENT).itemsize
        for part in weight.parts or (weight,):
            panels = -(-part.rows // PANEL_ROWS)
            self._kernels[part.format, name, tiles](
                (-(-panels // _WARPS), 1), (32 * _WARPS, 1, 1), x.address, part.address, y, rows, part.rows,
                part.columns, pitch, shared=_shared(part.format, tiles),
            )  # fmt: skip
            y += part.rows * size


def packed_formats(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Format]:
    """The formats that portable kernels multiply as they are; none on Hopper, which has its own."""
    if hopper or precision.plain_products:
        return []
    return [
        format_ for format_ in sorted(formats_in(spec, precision, but=OF_EXPERTS), key=str) if format_.packed
    ]


def _shared(format_: Format, tiles: int) -> int:
    """Bytes of shared memory of a block, as packed_rows.cu says."""
    stages = 3 if tiles < 4 else 2
    return stages * (16 * tiles * _PITCH + _WARPS * (_DEPTH // format_.step) * format_.packet)


def _source(format_: Format) -> Source:
    return source_of("packed_rows", f"-DFORMAT={format_.name}")
