"""The common part of launchers of packed products, on GPUs that have no faster kernels than mma.sync."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Kernel, Kind, Shape
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in

__all__ = ["RESULTS", "PortablePacked", "sources_of"]

RESULTS = ("elements", "floats", "added")
"""Kernels by what becomes of a product."""
_NOT_ELEMENTS = {Kind.FLOAT: "floats", Kind.ADDEND: "floats", Kind.RESIDUAL: "added"}

Tile = TypeVar("Tile")


class PortablePacked(ABC, Generic[Tile]):
    """A launcher whose kernels compute the rows of a matrix's parts, one after the other.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    """

    def __init__(self, activate: Activate, gate_up: Buffer) -> None:
        self._activate, self._gate_up = activate, gate_up

    def kernel(self, tile: Tile, shape: Shape) -> Kernel:
        """Bind a tile to a shape."""
        rows, activation, pitch = shape.rows, shape.kind.activation, shape.pitch or shape.outputs
        result = _NOT_ELEMENTS.get(shape.kind, "elements")
        if activation is None:
            return lambda x, weight, y: self._product(tile, result, x, weight, y.address, rows, pitch)
        activate, gate_up = self._activate, self._gate_up

        def two_kernels(x: Buffer, weight: Matrix, y: Buffer) -> None:
            self._product(tile, result, x, weight, gate_up.address, rows, weight.rows)
            activate(gate_up, y, rows, activation)

        return two_kernels

    def _product(
        self, tile: Tile, result: str, x: Buffer, weight: Matrix, y: int, rows: int, pitch: int
    ) -> None:
        """Queue the product, with rows of results that are `pitch` numbers apart."""
        size = (ELEMENT if result == "elements" else FLOAT).itemsize
        for part in weight.parts or (weight,):
            self._launch(tile, result, part, x.address, y, rows, pitch)
            y += part.rows * size

    @abstractmethod
    def _launch(self, tile: Tile, result: str, part: Matrix, x: int, y: int, rows: int, pitch: int) -> None:
        """Queue the kernel for a matrix in one format."""


def sources_of(
    source: Callable[[Format], Source], spec: ModelSpec, precision: Precision, *, hopper: bool
) -> list[Source]:
    """List a kernel file for each format of a model's matrices; none on Hopper, which has its own."""
    if hopper or precision.plain_products:
        return []
    formats = sorted(formats_in(spec, precision, but=OF_EXPERTS), key=str)
    return [source(format_) for format_ in formats if format_.packed]
