"""Feed-forward networks and mixtures of experts: launchers that layers of equal kinds share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nightmill.worker.model.spec import Experts, FeedForward, ModelSpec
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.experts.combine import Branches, Combine
from nightmill.worker.runners.gpu.experts.grouped import Given, GroupedProducts
from nightmill.worker.runners.gpu.experts.room import SLICE, ExpertRoom
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile
from nightmill.worker.runners.gpu.kinds import gate_up_kind
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.norms import Ending, Norms
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import (
    OF_EXPERTS,
    ExpertWeights,
    LayerWeights,
    formats_in,
)

__all__ = ["ExpertAlone", "ExpertLaunchers", "GateUp", "Mixture"]


class GateUp:
    """Gate, up and activation, in one launch if a product has all; layers of equal sizes share it.

    activate  the activation by itself
    inner     room for what it reads
    """

    def __init__(
        self, products: Products, activate: Activate, inner: Buffer, feed_forward: FeedForward, kind: Kind,
        weight: Matrix,
    ) -> None:  # fmt: skip
        outputs = weight.rows if kind is Kind.PLAIN else feed_forward.width
        self.product = products.of(kind, outputs, weight.columns, weight.format)
        self._activate = None if kind.activation else activate
        self._inner = inner
        self._activation, self._gated = feed_forward.activation, feed_forward.gated

    def __call__(self, x: Buffer, layer: LayerWeights, out: Buffer, rows: int) -> None:
        """Queue it for x (rows, width) -> out (rows, F)."""
        if self._activate is None:
            self.product(x, layer.gate_up, out, rows)
        else:
            self.product(x, layer.gate_up, self._inner, rows)
            self._activate(
                self._inner, out, rows, self._activation, gated=self._gated, bias=layer.gate_up_bias
            )

    def tune(
        self, x: Buffer, layers: Sequence[LayerWeights], out: Buffer, rows: int, beside: Callable[[], None]
    ) -> None:
        """Time the kernels of the product, as `Product.tune` does."""
        target = out if self._activate is None else self._inner
        self.product.tune(x, [layer.gate_up for layer in layers], target, rows, beside)


class ExpertLaunchers:
    """The launchers that all mixtures of a model share.

    formats  of the matrices of experts
    norms    of the residual stream
    padding  slot of the tokens that fill up a step
    """

    @classmethod
    def of(
        cls, device: Device, spec: ModelSpec, precision: Precision, norms: Norms, *, padding: int
    ) -> "ExpertLaunchers | None":
        """Load them for a model; None if it has no experts."""
        if not spec.experts:
            return None
        return cls(device, formats_in(spec, precision, *OF_EXPERTS), norms, padding)

    def __init__(self, device: Device, formats: set[Format], norms: Norms, padding: int) -> None:
        self.device = device
        self.padding = padding
        self.grouped = GroupedProducts(device, formats)
        self.combine = Combine(device)
        self.quantise = Quantise(device) if any(format_.scaled for format_ in formats) else None
        self.norms = norms


class Mixture:
    """The launchers of a mixture of experts; layers of one kind share it.

    width  of the residual stream
    own    the weights of one such layer
    at     buffers as wide as the shared expert needs
    """

    def __init__(
        self, launchers: ExpertLaunchers, products: Products, activate: Activate, experts: Experts,
        width: int, own: ExpertWeights, at: Activations,
    ) -> None:  # fmt: skip
        self._launchers, self._experts, self._own_at = launchers, experts, at
        self._room = ExpertRoom.at(
            at.expert_work.address, experts, width, at.x.shape[0], fp8=own.gate_up.format.scaled
        )
        self._routing = Routing(launchers.device, experts)
        self._gates, self._tile = self._routing.gates(self._room), launchers.grouped.tile
        self._router = products.of(Kind.FLOAT, own.router.rows, width, own.router.format)
        self._latent_down = self._latent_up = self._shared_gate_up = self._shared_down = None
        if experts.latent is not None:
            latent = experts.latent
            self._latent_down = products.of(Kind.PLAIN, latent, width, own.latent_down.format)
            self._latent_up = products.of(Kind.ADDEND, width, latent, own.latent_up.format)
        if (shared := experts.shared) is not None:
            weight = own.shared_gate_up
            self._shared_gate_up = GateUp(
                products, activate, at.gate_up, shared, gate_up_kind(shared), weight
            )
            self._shared_down = products.of(Kind.ADDEND, width, shared.width, own.shared_down.format)

    def __call__(
        self, entering: Buffer, layer: LayerWeights, x: Buffer, ending: Ending, out: Buffer, rows: int,
        slots: int,
    ) -> None:  # fmt: skip
        """Queue it for entering (rows, width) elements: x gets the sum, and out its norm.

        slots  address of the slots of these tokens; 0: none is of padding
        """
        for first in range(0, rows, SLICE):
            count = min(SLICE, rows - first)
            part, stream, own = entering.from_row(first), x.from_row(first), layer.experts
            assert own is not None
            self._read_beside(stream, own, count)
            self._queue(part, layer, own, count, slots and slots + 4 * first)
            self._launchers.combine.add(
                self._experts, self._room, self._gates, ending, stream, out.from_row(first), count,
                Branches(own.routed_post_norm, own.shared_post_norm),
            )  # fmt: skip

    def _read_beside(self, stream: Buffer, own: ExpertWeights, rows: int) -> None:
        """Queue the norms of the residual stream that router and experts read, if these are their own."""
        if self._experts.beside is not None:
            self._launchers.norms(stream, own.router_norm, self._room.routing, rows)
            self._launchers.norms(stream, own.routed_norm, self._room.read, rows)

    def _queue(self, x: Buffer, layer: LayerWeights, own: ExpertWeights, rows: int, slots: int) -> None:
        """Queue all of a slice between these norms and what is added to the residual stream in the end."""
        experts, at = self._experts, self._room
        tile = self._tile(experts, rows)
        routing, read = (x, x) if experts.beside is None else (at.routing, at.read)
        self._router(routing, own.router, at.logits, rows)
        self._routing(
            own.router_bias, own.selection_bias, at, rows, tile, slots=slots,
            padding=self._launchers.padding,
        )  # fmt: skip
        if self._latent_down is not None:
            self._latent_down(read, own.latent_down, at.latent, rows)
            read = at.latent
        self._multiply_gate_up(read, own, rows, tile)
        self._multiply_down(at.activated, own, rows, tile, rows * experts.used)
        if self._latent_up is not None:
            self._launchers.combine.mix(experts, at, rows)
            self._latent_up(at.mixed, own.latent_up, at.raised, rows)
        if self._shared_gate_up is not None and self._shared_down is not None:
            activated = self._own_at.activated
            self._shared_gate_up(x, _shared(layer), activated, rows)
            self._shared_down(activated, own.shared_down, at.shared, rows)

    def _multiply_gate_up(self, x: Buffer, own: ExpertWeights, rows: int, tile: ExpertTile) -> None:
        experts, at = self._experts, self._room
        scales = (own.gate_scale, own.up_scale) if experts.gated else (own.up_scale, ABSENT)
        given = Given(own.gate_up_bias, *scales)
        x = self._rounded(x, at.read_fp8, rows)
        self._launchers.grouped.gate_up(experts, x, own.gate_up, given, at, rows, tile)

    def _multiply_down(
        self, x: Buffer, own: ExpertWeights, rows: int, tile: ExpertTile, positions: int
    ) -> None:
        """positions: that there are."""
        at, given = self._room, Given(own.down_bias, own.down_scale)
        x = self._rounded(x, at.activated_fp8, positions)
        self._launchers.grouped.down(self._experts, x, own.down, given, at, rows, tile)

    def alone(self, own: ExpertWeights, expert: int, *, down: bool) -> "ExpertAlone":
        """The product of gate and up with an expert alone, or that of down, for who looks at products."""
        return ExpertAlone(self, own, expert, down)

    def _rounded(self, x: Buffer, room: Buffer, rows: int) -> Buffer:
        """The rows as FP8, if experts are that."""
        quantise = self._launchers.quantise
        if quantise is None:
            return x
        quantise(x.address, room.address, room.scales, rows, x.shape[1])
        return room

    def tune(self, x: Buffer, layers: Sequence[LayerWeights], rows: int, beside: Callable[[], None]) -> None:
        """Time the kernels of the products around experts, as `Product.tune` does."""
        at, weights = self._room, [own for layer in layers if (own := layer.experts) is not None]
        rows = min(rows, SLICE)
        self._router.tune(x, [own.router for own in weights], at.logits, rows, beside)
        if self._latent_down is not None and self._latent_up is not None:
            self._latent_down.tune(x, [own.latent_down for own in weights], at.latent, rows, beside)
            self._latent_up.tune(at.mixed, [own.latent_up for own in weights], at.raised, rows, beside)
        if self._shared_gate_up is not None and self._shared_down is not None:
            activated = self._own_at.activated
            self._shared_gate_up.tune(x, [_shared(layer) for layer in layers], activated, rows, beside)
            downs = [own.shared_down for own in weights]
            self._shared_down.tune(activated, downs, at.shared, rows, beside)


@dataclass(frozen=True, slots=True)
class ExpertAlone:
    """Multiplies all rows with one expert of a mixture.

    More rows than one go by the kernels of as many as there may be.
    """

    mixture: "Mixture"
    own: ExpertWeights
    expert: int
    down: bool

    @property
    def y(self) -> Buffer:
        """Room for what it gives: elements of gate and up with their activation, or floats."""
        room = self.mixture._room
        return room.outputs if self.down else room.activated

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        """Queue it for x (rows, inputs) elements, and wait; y: see above."""
        mixture = self.mixture
        experts, at, device = mixture._experts, mixture._room, mixture._launchers.device
        tile = mixture._tile(experts, 1 if rows == 1 else SLICE)
        sent = device.pinned((rows, experts.used), np.int32)
        sent[:] = -1
        sent[:, 0] = self.expert
        device.copy_in(at.chosen.address, sent)
        mixture._routing.place(at, rows, tile)
        if self.down:
            mixture._multiply_down(x, self.own, rows, tile, rows)
        else:
            mixture._multiply_gate_up(x, self.own, rows, tile)
        device.synchronize()


def _shared(layer: LayerWeights) -> LayerWeights:
    """The shared expert as the feed-forward network of a layer."""
    own = layer.experts
    assert own is not None
    return replace(layer, gate_up=own.shared_gate_up, gate_up_bias=own.shared_gate_up_bias)
