"""Products with weights, each by the way that is fastest for its sizes; see `shapes`."""

from collections.abc import Callable, Collection, Sequence

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device.device import CudaError, Device
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.products.clock import Choices, Clock
from nightmill.worker.runners.gpu.products.hopper_fp8 import HopperFp8
from nightmill.worker.runners.gpu.products.hopper_tiles import HopperTiles
from nightmill.worker.runners.gpu.products.library import LibraryProducts
from nightmill.worker.runners.gpu.products.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed_rows import PackedRows
from nightmill.worker.runners.gpu.products.packed_tiles import PackedProduct, PackedTiles
from nightmill.worker.runners.gpu.products.shapes import (
    Candidate,
    Kind,
    ProductLauncher,
    Shape,
    Way,
    padded_rows,
)
from nightmill.worker.runners.gpu.products.split import SplitTiles
from nightmill.worker.runners.gpu.products.unpacked import Unpacked
from nightmill.worker.runners.gpu.rows.activate import Activate

__all__ = ["Product", "Products"]

_FEW_ROWS = 64  # up to which a matrix is not worth being dequantised before it is multiplied


class Product:
    """A product of one size and kind for any number of rows; layers of equal sizes share it.

    Can be captured in a graph.
    """

    __slots__ = ("_choices", "_shape", "_ways")

    def __init__(
        self, clock: Clock, candidates: Callable[[Shape], list[Candidate]], shape: Callable[[int], Shape]
    ) -> None:
        self._shape = shape
        self._ways: dict[int, Way] = {}
        """By padded rows."""
        self._choices: Choices[Candidate] = Choices(
            clock, lambda rows: candidates(shape(rows)), lambda one, rows: one.suits(shape(rows))
        )

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        """Queue it; all have room for `padded_rows(rows)`."""
        if rows:
            padded = padded_rows(rows)
            (self._ways.get(padded) or self._choose(padded))(x, weight, y)

    def tune(
        self, x: Buffer, weights: Sequence[Matrix], y: Buffer, rows: int, beside: Callable[[], None]
    ) -> None:
        """Time the ways for so many rows on these operands and keep the fastest.

        weights  several, so that they come from memory as in a step, not from the cache
        beside   queues a kernel as it stands before and after the product in a step (`Clock.ranked`)

        Waits for the device. What is at `y` is overwritten. A size is tuned once.
        """
        padded = padded_rows(rows)
        shape = self._shape(padded)

        def runs(candidate: Candidate) -> Callable[[int], None]:
            way = candidate.way(shape)
            return lambda turn: way(x, weights[turn % len(weights)], y)

        if self._choices.tune(padded, runs, beside):
            self._choose(padded)

    @property
    def activation(self) -> Activation | None:
        """Of the gate, where the product has that inside."""
        return self._shape(1).kind.activation

    @property
    def tuned(self) -> dict[int, str]:
        """The names of the ways that were fastest, by rows."""
        return {rows: way.name for rows, way in sorted(self._choices.tuned.items())}

    def _choose(self, rows: int) -> Way:
        way = self._ways[rows] = self._choices.best(rows).way(self._shape(rows))
        return way


class Products:
    """All products with weights.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    kinds              that there will be
    unpacked           bytes for packed weights that become elements (`Unpacked.workspace`)
    quantised          where layers have FP8 weights: room for what enters their products, as FP8
    packed             kinds and formats of products that take packed weights as they are; other matrices
                       that are packed become elements first
    """

    def __init__(
        self, device: Device, activate: Activate, gate_up: Buffer, kinds: Collection[Kind] = tuple(Kind),
        unpacked: int = 0, quantised: Buffer | None = None, packed: Collection[PackedProduct] = (),
    ) -> None:  # fmt: skip
        self._library = LibraryProducts(device, activate, gate_up)
        self._ours: list[ProductLauncher] = []
        self._of_others: list[ProductLauncher] = []
        """For formats that are not the element's."""
        if quantised is not None:
            self._of_others.append(HopperFp8(device, kinds, quantised))
        elif device.hopper:
            self._ours = [HopperTiles(device, kinds), SplitTiles(device, kinds)]
        self._packed: list[ProductLauncher] = []
        if packed and device.hopper:
            self._packed = [PackedFew(device, packed), PackedTiles(device, packed)]
        elif packed:
            self._packed = [PackedRows(device, {kept for _, kept in packed}, activate, gate_up)]
        self.takes_packed = bool(packed)
        """Whether kernels multiply packed weights as they are."""
        self._unpacked = Unpacked(device, unpacked, self._of_elements) if unpacked else None
        self.clock = Clock(device, self._library.scratch, LibraryProducts.workspace())
        self._elements = device.element.format
        self._known: dict[tuple[Kind, int, int, Format], Product] = {}

    def of(self, kind: Kind, outputs: int, inputs: int, kept: Format | None = None) -> Product:
        """The product of these sizes with weights of a format; None: elements."""
        kept = kept or self._elements
        key = kind, outputs, inputs, kept
        if key not in self._known:
            self._known[key] = Product(
                self.clock, self._candidates, lambda rows: Shape(rows, outputs, inputs, kind, kept)
            )
        return self._known[key]

    def tuned(self) -> dict[str, dict[int, str]]:
        """Which way is fastest for how many rows, by product: `swiglu 4864 x 896, f16`; for a person."""
        return {
            f"{kind.value} {outputs:,} x {inputs:,}, {kept.value[0]}": product.tuned
            for (kind, outputs, inputs, kept), product in self._known.items()
        }

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        self._library.close()

    def _candidates(self, shape: Shape) -> list[Candidate]:
        """Everything that can compute this shape, the best guess first."""
        if shape.format.plain:
            return self._of_elements(shape)
        if shape.format is Format.FP8:
            return [one for launcher in self._of_others for one in launcher.candidates(shape)]
        return self._of_packed(shape)

    def _of_packed(self, shape: Shape) -> list[Candidate]:
        tiles = [one for launcher in self._packed for one in launcher.candidates(shape)]
        if tiles and shape.rows <= _FEW_ROWS:
            return tiles
        by_elements = self._unpacked.candidates(shape) if self._unpacked is not None else []
        return tiles + by_elements

    def _of_elements(self, shape: Shape) -> list[Candidate]:
        ours = [one for launcher in self._ours for one in launcher.candidates(shape)]
        library = self._library.candidates(shape)
        found = library + ours if shape.kind.activation is None else ours + library
        if not found:
            raise CudaError(f"no kernel computes the product {shape}: sizes are multiples of 8")
        return found
