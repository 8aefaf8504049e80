"""Mixers of a layer's tokens, between the norm before them and the product that is added afterwards.

`enter` makes of the layer's input what is mixed; of attention it also puts keys and values into the pages.
`mix` does the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nightmill.worker.model.spec import Attention, LatentAttention, Mixer, ModelSpec, Role
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.attention.choice import Attentions
from nightmill.worker.runners.gpu.attention.latent_rows import HeadProducts, LatentRoom, LatentRows
from nightmill.worker.runners.gpu.attention.plans import Decode, Prefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Matrix
from nightmill.worker.runners.gpu.kinds import mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.products.chooser import Product, Products
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.qkv import Qkv
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.rotation import Rotation, same_table
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.states.choice import state_mixer
from nightmill.worker.runners.gpu.states.operands import LayerStates
from nightmill.worker.runners.gpu.states.operands import Mixer as StateLauncher
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights.layout import LatentWeights, LayerWeights

__all__ = ["AttentionMixer", "LatentMixer", "LayerMixer", "MixedLayer", "Mixers", "StateMixer"]


class MixedLayer(Protocol):
    """A layer as a mixer sees it."""

    @property
    def weights(self) -> LayerWeights: ...

    @property
    def cache(self) -> LayerCache: ...

    @property
    def states(self) -> LayerStates: ...

    @property
    def at(self) -> Activations: ...


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Attention; layers of one kind share it.

    decode, prefill  of drawn tokens, and of prompts
    gates            the product that gives them, if there are any
    plan             the number of that by which steps are divided for them
    """

    qkv: Qkv
    decode: Decode
    prefill: Prefill
    gates: Product | None
    activate: Activate
    plan: int = 0

    entering_is_enough = True
    """True if a step that draws nothing may end after `enter` of the last layer: later ones miss nothing."""

    def enter(self, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """Queue queries, keys, values and gates of x (rows, width)."""
        self.qkv(x, layer.weights, inputs, layer.at.qkv, layer.cache, rows)
        if self.gates is not None:
            self.gates(x, layer.weights.attn_gate, layer.at.gates, rows)

    def enter_few(self, few: FewRows, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """The same for a few drawn tokens, from the norm of the residual stream x on."""
        own, at = layer.weights, layer.at
        if few.rotates:
            few.qkv(x, own, inputs, at.qkv, layer.cache, rows)
            return
        few.input(x, own.attn_norm, own.qkv, at.qkv, own.attn_gate, at.gates, rows)
        self.qkv.finish(own, inputs, at.qkv, layer.cache, rows)

    def mix(self, layer: MixedLayer, inputs: StepInputs, shape: StepShape) -> None:
        """Queue attention of the drawn tokens, and of the chunks of prompts."""
        inputs, shape = inputs.planned(self.plan), shape.planned(self.plan)
        if shape.drawn:
            self.decode(layer.at.qkv, layer.cache, inputs, shape, layer.at.mixed, layer.weights.sinks)
        if shape.tiles:
            self.prefill(layer.at.qkv, layer.cache, inputs, shape, layer.at.mixed, layer.weights.sinks)
        if self.gates is not None:
            self.activate.open_gates(layer.at.mixed, layer.at.gates, shape.tokens)

    def tune(self, x: Buffer, layers: Sequence[MixedLayer], rows: int, beside: Callable[[], None]) -> None:
        """Time the kernels of its products, as `Product.tune` does."""
        at, weights = layers[0].at, [layer.weights for layer in layers]
        self.qkv.tune(x, weights, at.qkv, layers[0].cache, at.no_rows, rows, beside)
        if self.gates is not None:
            self.gates.tune(x, [own.attn_gate for own in weights], at.gates, rows, beside)


@dataclass(frozen=True, slots=True)
class StateMixer:
    """A mixer with a state; layers of one kind share it.

    title     of the kind of mixer
    input     the product of what it mixes
    controls  the product of what decays, betas and time steps are made of, if it has such
    launcher  of its kernels
    """

    title: str
    input: Product
    controls: Product | None
    launcher: StateLauncher

    entering_is_enough = False

    def enter(self, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """Queue the products of x (rows, width)."""
        self.input(x, layer.weights.mixer_input, layer.at.qkv, rows)
        if self.controls is not None:
            self.controls(x, layer.weights.mixer_controls, layer.at.controls, rows)

    def enter_few(self, few: FewRows, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """The same for a few drawn tokens, from the norm of the residual stream x on."""
        own, at = layer.weights, layer.at
        few.input(x, own.attn_norm, own.mixer_input, at.qkv, own.mixer_controls, at.controls, rows)

    def mix(self, layer: MixedLayer, inputs: StepInputs, shape: StepShape) -> None:
        """Queue the step's pieces to go through the states of their slots."""
        at, small = layer.at, layer.weights.mixer
        assert small is not None
        controls = ABSENT if self.controls is None else at.controls
        self.launcher(at.qkv, controls, small, layer.states, inputs.pieces_of_states, at.mixed)

    def tune(self, x: Buffer, layers: Sequence[MixedLayer], rows: int, beside: Callable[[], None]) -> None:
        """Time the kernels of its products, as `Product.tune` does."""
        at, weights = layers[0].at, [layer.weights for layer in layers]
        self.input.tune(x, [own.mixer_input for own in weights], at.qkv, rows, beside)
        if self.controls is not None:
            self.controls.tune(x, [own.mixer_controls for own in weights], at.controls, rows, beside)


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """Latent attention, absorbed; layers of one kind share it.

    q_down, q_up, kv_down  products; the first is None where queries are made of the layer's input
    rows                   norms, rotation and pages
    heads                  products of heads: of queries before attention, of values after it
    room                   buffers, for one layer after the other
    """

    q_down: Product | None
    q_up: Product
    kv_down: Product
    rows: LatentRows
    heads: HeadProducts
    decode: Decode
    prefill: Prefill
    room: LatentRoom

    entering_is_enough = True

    def enter(self, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """Queue what is kept of x (rows, width), to its pages, and queries in the space of the latent."""
        weights, room = _latent(layer), self.room
        self.kv_down(x, weights.kv_down, room.kept, rows)
        if self.q_down is not None:
            self.q_down(x, weights.q_down, room.down, rows)
        self.rows.keep(room, weights, inputs, layer.cache, rows)
        self.q_up(x if self.q_down is None else room.down, weights.q_up, room.queries, rows)
        self.heads.of_queries(room.queries, weights.k_up, room.absorbed, inputs, rows)

    def enter_few(self, few: FewRows, x: Buffer, layer: MixedLayer, inputs: StepInputs, rows: int) -> None:
        """Nothing: `FewRows` suits no model with latent attention."""
        raise TypeError("latent attention has no kernels for few rows")

    def mix(self, layer: MixedLayer, inputs: StepInputs, shape: StepShape) -> None:
        """Queue attention of the drawn tokens, and of the chunks of prompts; then values."""
        room = self.room
        if shape.drawn:
            self.decode(room.absorbed, layer.cache, inputs, shape, room.mixed)
        if shape.tiles:
            self.prefill(room.absorbed, layer.cache, inputs, shape, room.mixed)
        self.heads(room.mixed, _latent(layer).v_up, layer.at.mixed, shape.tokens)

    def products(self, layer: MixedLayer) -> list[tuple[Role, Product, Matrix, Buffer, Buffer | None]]:
        """Its products with a layer's matrices: what they write, and what they read if not its input."""
        own, room = _latent(layer), self.room
        down = None if self.q_down is None else room.down
        each = [(Role.KV_DOWN, self.kv_down, own.kv_down, room.kept, None)]
        if self.q_down is not None:
            each.append((Role.Q_DOWN, self.q_down, own.q_down, room.down, None))
        return [*each, (Role.Q_UP, self.q_up, own.q_up, room.queries, down)]

    def tune(self, x: Buffer, layers: Sequence[MixedLayer], rows: int, beside: Callable[[], None]) -> None:
        """Time the kernels of its products, as `Product.tune` does."""
        for each in zip(*(self.products(layer) for layer in layers), strict=True):
            _, product, _, y, read = each[0]
            product.tune(
                x if read is None else read, [matrix for _, _, matrix, _, _ in each], y, rows, beside
            )


def _latent(layer: MixedLayer) -> LatentWeights:
    assert layer.weights.latent is not None
    return layer.weights.latent


LayerMixer = AttentionMixer | LatentMixer | StateMixer


class Mixers:
    """Makes the mixers of a model's layers.

    max_context  tokens that a sequence may have
    """

    def __init__(
        self, device: Device, spec: ModelSpec, products: Products, activate: Activate, attentions: Attentions,
        at: Activations, *, max_context: int,
    ) -> None:  # fmt: skip
        self._device = device
        self._width, self._work, self._rows = spec.width, at.work.address, at.x.shape[0]
        self._products, self._activate, self._attentions = products, activate, attentions
        self._made = at.made
        self._rotations: dict[Attention, Rotation] = {}
        tables: dict[object, Buffer] = {}
        for attention in spec.attentions:
            rotation = self._rotations[attention] = Rotation(
                device, attention, max_context=max_context, statistics=at.statistics,
                table=tables.get(same_table(attention)),
            )  # fmt: skip
            tables[same_table(attention)] = rotation.table
        self._latents = {
            latent: (
                LatentRows(device, latent, max_context=max_context),
                LatentRoom.of(latent, at.qkv.address, self._work, self._rows),
            )
            for latent in spec.latents
        }

    def angles_of(self, mixer: Mixer | None) -> Buffer | None:
        """The rotation table of a kind of attention; None of other mixers."""
        return self._rotations[mixer].table if isinstance(mixer, Attention) else None

    def of(self, mixer: Mixer, weights: LayerWeights) -> LayerMixer:
        """Make the mixer of a layer, and of those that are like it, in the formats of weights too."""
        products, width, sizes = self._products, self._width, mixer_sizes(mixer)
        if isinstance(mixer, LatentAttention):
            return self._latent_mixer(mixer, weights)
        if not isinstance(mixer, Attention):
            controls = None
            if sizes.controls:
                controls = products.of(Kind.ADDEND, sizes.controls, width, weights.mixer_controls.format)
            return StateMixer(
                mixer.title,
                products.of(Kind.PLAIN, sizes.inputs, width, weights.mixer_input.format),
                controls,
                state_mixer(self._device, mixer, self._work, self._rows),
            )
        decode, prefill, plan = self._attentions.of(mixer)
        gates = None
        if mixer.gated:
            gates = products.of(Kind.PLAIN, sizes.gates, width, weights.attn_gate.format)
        plain = replace(mixer, gated=False)
        qkv = Qkv(self._device, plain, weights.qkv, products, self._rotations[mixer], self._made)
        return AttentionMixer(qkv, decode, prefill, gates, self._activate, plan)

    def _latent_mixer(self, mixer: LatentAttention, weights: LayerWeights) -> LatentMixer:
        products, width, own = self._products, self._width, weights.latent
        assert own is not None
        rows, room = self._latents[mixer]
        decode, prefill, _ = self._attentions.of(mixer)
        down, made_of = None, width
        if mixer.query_latent is not None:
            down, made_of = (
                products.of(Kind.PLAIN, mixer.query_latent, width, own.q_down.format),
                mixer.query_latent,
            )
        return LatentMixer(
            q_down=down,
            q_up=products.of(Kind.PLAIN, mixer.heads * mixer.head_dim, made_of, own.q_up.format),
            kv_down=products.of(Kind.PLAIN, mixer.kept, width, own.kv_down.format),
            rows=rows,
            heads=HeadProducts(self._device, mixer.heads, rows),
            decode=decode,
            prefill=prefill,
            room=room,
        )
