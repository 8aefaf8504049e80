"""Queries, keys and values of a layer: one launch where a kernel suits, or a product and the rotation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Matrix
from nightmill.worker.runners.gpu.kinds import made_heads
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.clock import Choices, Naming
from nightmill.worker.runners.gpu.products.elements.hopper_qkv import HopperQkv
from nightmill.worker.runners.gpu.products.packed.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.shapes import Kind, padded_rows
from nightmill.worker.runners.gpu.step_inputs import StepInputs
from nightmill.worker.runners.gpu.weights.layout import LayerWeights

__all__ = ["Qkv"]

_QkvKernel = Callable[[Buffer, LayerWeights, int, int, Buffer, LayerCache, int], None]
"""Queues x, layer, positions, cache rows, qkv, cache, rows."""


def _any_number(rows: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Choice:
    """A kernel, and whether it is worth timing for so many rows."""

    name: str
    kernel: _QkvKernel
    suits: Callable[[int], bool] = _any_number


class Qkv:
    """Queries in place, keys and values to the pages, of layers of one kind; all ways give the same bits.

    weight  of one of them
    made    room for what a product gives, if layers make no keys, or none but keys
    """

    def __init__(
        self, device: Device, attention: Attention, weight: Matrix, products: Products, rotation: Rotation,
        made: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        self._device = device
        heads = made_heads(attention)
        self._made = None if heads == attention.heads + 2 * attention.kv_heads else made
        self.product = products.of(Kind.PLAIN, heads * attention.head_dim, weight.columns, weight.format)
        self._rotation = rotation
        self._every = [_Choice("apart", self._apart)]
        if HopperQkv.suits(attention, weight.format, hopper=device.hopper):
            fused = HopperQkv(device, attention, rotation.table)
            self._every += [_Choice(f"fused {tile.name}", partial(fused.run, tile)) for tile in fused.tiles]
        suits = PackedQkv.suits(attention, weight.formats, device.kv, hopper=device.hopper)
        self.takes_packed = suits and products.takes_packed
        """True if a kernel multiplies and rotates with packed weights."""
        if self.takes_packed:
            packed = PackedQkv(device, attention, weight.formats, rotation.table)
            tiles = (tile for tile in packed.tiles if tile.takes(weight.columns))
            self._every += [
                _Choice(f"packed {tile.name}", partial(packed.run, tile), tile.worthwhile) for tile in tiles
            ]
        what = f"qkv of {attention} x {weight.columns}, {weight.formats}"
        self._choices: Choices[_Choice] = Choices(
            products.clock,
            lambda rows: [one for one in self._every if one.suits(rows)],
            lambda one, rows: one.suits(rows),
            naming=Naming(what, lambda one: one.name, lambda one: one.name),
        )
        self._kernels: dict[int, _QkvKernel] = {}
        """By padded rows."""

    def __call__(
        self, x: Buffer, layer: LayerWeights, inputs: StepInputs, qkv: Buffer, cache: LayerCache, rows: int
    ) -> None:
        """Queue it for x (rows, width), which has room for `padded_rows(rows)`."""
        if rows:
            padded = padded_rows(rows)
            kernel = self._kernels.get(padded) or self._choose(padded)
            kernel(x, layer, inputs.positions, inputs.cache_rows, qkv, cache, rows)

    def finish(
        self, layer: LayerWeights, inputs: StepInputs, qkv: Buffer, cache: LayerCache, rows: int
    ) -> None:
        """Queue what is done to the product of `rows` tokens, which is in qkv."""
        self._rotation(qkv, layer, inputs.positions, inputs.cache_rows, cache, rows)

    def tune(
        self, x: Buffer, layers: Sequence[LayerWeights], qkv: Buffer, cache: LayerCache, no_rows: Buffer,
        rows: int, beside: Callable[[], None],
    ) -> None:  # fmt: skip
        """Time the kernels for so many rows and remember the fastest; waits for the device.

        no_rows  room for an int32 a row, filled with -1: no row of the pages is written
        beside   as for `Product.tune`

        What is at `qkv` and `no_rows` is overwritten; the pages are not.
        """
        self.product.tune(x, [layer.qkv for layer in layers], self.target(qkv), rows, beside)
        if len(self._every) == 1:
            return
        nowhere = no_rows.address
        self._device.fill(nowhere, 0xFF, 4 * rows)  # no row of the pages, and of positions the first

        def runs(choice: _Choice) -> Callable[[int], None]:
            return lambda turn: choice.kernel(
                x, layers[turn % len(layers)], nowhere, nowhere, qkv, cache, rows
            )

        if self._choices.tune(padded_rows(rows), runs, beside):
            self._choose(padded_rows(rows))

    def _choose(self, rows: int) -> _QkvKernel:
        kernel = self._kernels[rows] = self._choices.best(rows).kernel
        return kernel

    def _apart(
        self, x: Buffer, layer: LayerWeights, positions: int, cache_rows: int, qkv: Buffer, cache: LayerCache,
        rows: int,
    ) -> None:  # fmt: skip
        self.product(x, layer.qkv, self.target(qkv), rows)
        self._rotation(qkv, layer, positions, cache_rows, cache, rows, self._made)

    def target(self, qkv: Buffer) -> Buffer:
        """Return the buffer that the product goes into."""
        return qkv if self._made is None else self._made
