"""The layers of a model, each bound once to its launchers, weights, pages and buffers.

What a layer is made of follows from its spec alone: whether its products are fused with what comes after, and
what is added to the residual stream, as it is or normed, scaled, with a bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nightmill.worker.model.spec import FeedForward, LayerSpec, ModelSpec
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.attention.choice import Attentions, Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.kinds import layer_kinds
from nightmill.worker.runners.gpu.kv_cache import KvCache, LayerCache
from nightmill.worker.runners.gpu.products.chooser import Product, Products
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.qkv import Qkv
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, NormWeight, Weights

__all__ = ["Addition", "GateUp", "Layer", "LayerKernels", "Launchers", "bind_layers"]


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


@dataclass(frozen=True, slots=True)
class Addition:
    """A product that is added to the residual stream, and the norm for what reads that next.

    added  room for what it gives, if more than a sum is to be made of that; else None
    bias, after, scale  x += scale * after(product + bias)
    then   the norm; None where what reads next has it already
    """

    product: Product
    weight: Matrix
    norms: Norms
    added: Buffer | None
    bias: Buffer
    after: NormWeight
    scale: float
    then: NormWeight | None

    def __call__(self, source: Buffer, x: Buffer, normed: Buffer, rows: int) -> None:
        """Queue it for source (rows, inputs)."""
        if self.added is not None:
            self.product(source, self.weight, self.added, rows)
            self.norms.add(self.added, self.bias, self.after, self.scale, x, self.then, normed, rows)
            return
        self.product(source, self.weight, x, rows)
        if self.then is not None:
            self.norms(x, self.then, normed, rows)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The launchers of layers of one kind, but for norms, which all layers share.

    decode, prefill  attention of drawn tokens, and of prompts
    few              the fused kernels for steps of a few sequences, where they suit
    """

    qkv: Qkv
    decode: Decode
    prefill: Prefill
    output: Product
    gate_up: GateUp
    down: Product
    few: FewRows | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    attended, fed  what attention, and the feed-forward network, end with
    parallel       both read what attention's norm gives
    at             buffers as wide as it needs
    """

    kernels: LayerKernels
    weights: LayerWeights
    cache: LayerCache
    attended: Addition
    fed: Addition
    parallel: bool
    at: Activations


@dataclass(frozen=True, slots=True)
class Launchers:
    """The launchers that all layers of a model share."""

    products: Products
    norms: Norms
    activate: Activate
    attentions: Attentions


def bind_layers(
    device: Device, spec: ModelSpec, weights: Weights, cache: KvCache, at: Activations, launchers: Launchers,
    *, max_context: int,
) -> tuple[Layer, ...]:  # fmt: skip
    """Bind all layers; those alike, in weights' formats too, share launchers and what timing finds out."""
    products, norms = launchers.products, launchers.norms
    rotations = {
        attention: Rotation(device, attention, max_context=max_context, statistics=at.statistics)
        for attention in spec.attentions
    }

    def kernels_of(layer: LayerSpec, own: LayerWeights) -> LayerKernels:
        attention, width, ffn = layer.attention, spec.width, layer.dense
        rotation, kinds = rotations[attention], layer_kinds(layer)
        decode, prefill = launchers.attentions.of(attention)
        few = FewRows.suits(layer, width, own.formats, hopper=device.hopper)
        return LayerKernels(
            qkv=Qkv(device, attention, own.qkv, products, rotation),
            decode=decode,
            prefill=prefill,
            output=products.of(kinds.output, width, attention.queries, own.attn_output.format),
            gate_up=GateUp(
                products, launchers.activate, at.of(layer).gate_up, ffn, kinds.gate_up, own.gate_up
            ),
            down=products.of(kinds.down, width, ffn.width, own.ffn_down.format),
            few=FewRows(device, layer, width, rotation.table) if few else None,
        )

    def bound(layer: LayerSpec, own: LayerWeights, pages: LayerCache, following: NormWeight) -> Layer:
        kind = layer, own.formats
        if kind not in known:
            known[kind] = kernels_of(layer, own)
        kernels, kinds, scale = known[kind], layer_kinds(layer), layer.residual_scale
        attended = Addition(
            kernels.output, own.attn_output, norms, at.added if kinds.output is Kind.ADDEND else None,
            own.attn_output_bias, own.attn_post_norm, scale, None if layer.parallel else own.ffn_norm,
        )  # fmt: skip
        fed = Addition(
            kernels.down, own.ffn_down, norms, at.added if kinds.down is Kind.ADDEND else None,
            own.ffn_down_bias, own.ffn_post_norm, scale, following,
        )  # fmt: skip
        return Layer(kernels, own, pages, attended, fed, layer.parallel, at.of(layer))

    known: dict[tuple[LayerSpec, tuple[Format, ...]], LayerKernels] = {}
    before = [*(own.attn_norm for own in weights.layers), weights.output_norm]
    each = zip(spec.layers, weights.layers, cache.layers, pairwise(before), strict=True)
    return tuple(bound(layer, own, pages, following) for layer, own, pages, (_, following) in each)
