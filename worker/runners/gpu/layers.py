"""The layers of a model, each bound once to its launchers, weights, pages and buffers.

What a layer is made of follows from its spec alone: what mixes its tokens, if anything does, whether it has a
feed-forward network or experts, whether its products are fused with what comes after, and what is added to
the residual stream, as it is or normed, scaled, with a bias.
"""

from dataclasses import dataclass, replace

from nightmill.worker.model.spec import Attention, Experts, LayerSpec, ModelSpec
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.feed_forward import ExpertLaunchers, GateUp, Mixture
from nightmill.worker.runners.gpu.kinds import layer_kinds, mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import KvCache, LayerCache
from nightmill.worker.runners.gpu.mixers import LayerMixer, Mixers
from nightmill.worker.runners.gpu.products.chooser import Product, Products
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.norms import Ending, Norms
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.states.operands import LayerStates
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, LayerWeights, NormWeight, Weights

__all__ = ["Addition", "Layer", "LayerKernels", "Launchers", "bind_layers"]


@dataclass(frozen=True, slots=True)
class Addition:
    """A product that is added to the residual stream, and the norm for what reads that next.

    added   room for what it gives, if more than a sum is to be made of that; else None
    bias    that is added to the product
    ending  what is done then; without a norm `before` where what reads next has it already
    """

    product: Product
    weight: Matrix
    norms: Norms
    added: Buffer | None
    bias: Buffer
    ending: Ending

    def __call__(self, source: Buffer, x: Buffer, normed: Buffer, rows: int) -> None:
        """Queue it for source (rows, inputs)."""
        if self.added is not None:
            self.product(source, self.weight, self.added, rows)
            self.norms.add(self.added, self.bias, self.ending, x, normed, rows)
            return
        self.product(source, self.weight, x, rows)
        if self.ending.before is not None:
            self.norms(x, self.ending.before, normed, rows)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The launchers of one kind of layer; None for a part that it lacks. Norms are shared by all layers.

    mixture  experts, in place of gate_up and down
    input_gate, input_up  of an input of the layer's own
    few  the fused kernels for steps of a few sequences, where they suit
    """

    mixer: LayerMixer | None
    output: Product | None
    gate_up: GateUp | None
    down: Product | None
    mixture: Mixture | None
    few: FewRows | None
    input_gate: Product | None = None
    input_up: Product | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    attended, fed  what its mixer, and the feed-forward network, end with; None where there is no such
    combined       the same of experts
    given          the same of its own input
    parallel       both read what attention's norm gives
    norms_behind   norms stand behind what is added
    at             buffers as wide as it needs
    """

    kernels: LayerKernels
    weights: LayerWeights
    cache: LayerCache
    states: LayerStates
    attended: Addition | None
    fed: Addition | None
    combined: Ending | None
    given: Addition | None
    parallel: bool
    norms_behind: bool
    at: Activations

    @property
    def feeds(self) -> bool:
        """True if it has a feed-forward network, or experts."""
        return self.fed is not None or self.combined is not None

    @property
    def first_norm(self) -> NormWeight:
        """The norm of what enters it."""
        if self.norms_behind:
            return NO_NORM
        return self.weights.ffn_norm if self.attended is None else self.weights.attn_norm


@dataclass(frozen=True, slots=True)
class Launchers:
    """The launchers that all layers of a model share; None of experts, if it has none."""

    products: Products
    norms: Norms
    activate: Activate
    mixers: Mixers
    experts: ExpertLaunchers | None = None


def bind_layers(
    device: Device, spec: ModelSpec, weights: Weights, cache: KvCache, states: States, at: Activations,
    launchers: Launchers,
) -> tuple[Layer, ...]:  # fmt: skip
    """Bind all layers; those alike, in weights' formats too, share launchers and what timing finds out."""
    products, norms, width = launchers.products, launchers.norms, spec.width

    def kernels_of(layer: LayerSpec, own: LayerWeights) -> LayerKernels:
        mixer, ffn, kinds = layer.mixer, layer.feed_forward, layer_kinds(layer)
        output = gate_up = down = mixture = few = input_gate = input_up = None
        if kinds.output is not None:
            outputs = mixer_sizes(mixer).outputs
            output = products.of(kinds.output, width, outputs, own.attn_output.format)
        if isinstance(ffn, Experts):
            assert launchers.experts is not None
            assert own.experts is not None
            mixture = Mixture(
                launchers.experts, products, launchers.activate, ffn, width, own.experts, at.of(layer)
            )
        elif kinds.gate_up is not None and kinds.down is not None:
            inner = at.of(layer).gate_up
            gate_up = GateUp(products, launchers.activate, inner, ffn, kinds.gate_up, own.gate_up)
            down = products.of(kinds.down, width, ffn.width, own.ffn_down.format)
        if fuses:
            rotates = FewRows.suits(layer, width, own.formats, hopper=device.hopper)
            few = FewRows(device, layer, width, launchers.mixers.angles_of(mixer) if rotates else None)
        if (inputs := layer.inputs) is not None:
            input_gate = products.of(Kind.PLAIN, inputs.width, width, own.input_gate.format)
            input_up = products.of(Kind.ADDEND, width, inputs.width, own.input_up.format)
        mixes = None if mixer is None else launchers.mixers.of(mixer, own)
        return LayerKernels(mixes, output, gate_up, down, mixture, few, input_gate, input_up)

    def bound(index: int, layer: LayerSpec, own: LayerWeights) -> Layer:
        kind = layer, own.formats
        if kind not in known:
            known[kind] = kernels_of(layer, own)
        kernels, kinds, scale = known[kind], layer_kinds(layer), layer.residual_scale
        following, attended, fed, combined, given = entered[index + 1], None, None, None, None
        # What comes next of a layer with an input of its own is the product that reads the stream as it is.
        end: tuple[Buffer, NormWeight] = own.scale, following
        inner = (ABSENT, NO_NORM) if layer.inputs is not None else end
        if kernels.output is not None:
            feeds = kernels.down is not None or kernels.mixture is not None
            then = Ending(own.attn_post_norm, scale, *inner)
            if feeds:
                then = replace(then, factor=ABSENT, before=None if layer.parallel else own.ffn_norm)
            if layer.norms_behind:
                then = replace(then, before=own.attn_norm, behind=True)
            attended = Addition(
                kernels.output, own.attn_output, norms, at.added if kinds.output is Kind.ADDEND else None,
                own.attn_output_bias, then,
            )  # fmt: skip
        if kernels.down is not None:
            fed = Addition(
                kernels.down, own.ffn_down, norms, at.added if kinds.down is Kind.ADDEND else None,
                own.ffn_down_bias,
                Ending(own.ffn_post_norm, scale, *inner, behind=layer.norms_behind),
            )  # fmt: skip
        if kernels.mixture is not None:
            combined = Ending(own.ffn_post_norm, scale, *inner)
        if kernels.input_up is not None:
            given = Addition(
                kernels.input_up, own.input_up, norms, at.added, ABSENT,
                Ending(own.input_post_norm, 1.0, *end),
            )  # fmt: skip
        mixer = layer.mixer
        kept = mixer.keys_of if isinstance(mixer, Attention) and mixer.keys_of is not None else index
        return Layer(
            kernels, own, cache.layers[kept], states.layers[index], attended, fed, combined, given,
            layer.parallel, layer.norms_behind, at.of(layer),
        )  # fmt: skip

    fuses = all(
        FewRows.suits_products(layer, width, own.formats, hopper=device.hopper)
        for layer, own in zip(spec.layers, weights.layers, strict=True)
    )
    known: dict[tuple[LayerSpec, tuple[Format, ...]], LayerKernels] = {}
    each = list(zip(spec.layers, weights.layers, strict=True))
    entered = [own.ffn_norm if layer.mixer is None else own.attn_norm for layer, own in each]
    entered.append(weights.output_norm)
    for index, (layer, own) in enumerate(each[:-1]):  # the model's norm is the last of its last layer
        if layer.norms_behind:
            entered[index + 1] = own.ffn_norm
    return tuple(bound(index, layer, own) for index, (layer, own) in enumerate(each))
