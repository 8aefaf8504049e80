"""Kinds and sizes of the products that the layers of a model have."""

from typing import NamedTuple

from nightmill.worker.model.spec import (
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelSpec,
    Norm,
    ShortConv,
)
from nightmill.worker.runners.gpu.shapes import GATED, Kind

__all__ = [
    "LayerKinds", "MixerSizes", "gate_up_kind", "has_tail", "kinds_of", "last_keeping", "layer_kinds",
    "made_heads", "mixer_sizes", "only_rotates",
]  # fmt: skip


class LayerKinds(NamedTuple):
    """Kinds of a layer's products, beside that of queries, keys and values, which is PLAIN.

    RESIDUAL where a product is added to the residual stream as it is; ADDEND where a bias, a norm or a scale
    comes between, or after. PLAIN where the activation is no part of gate and up. None where the layer has
    none; experts have products of their own.
    """

    output: Kind | None
    gate_up: Kind | None
    down: Kind | None


class MixerSizes(NamedTuple):
    """Numbers that a mixer has of a token, multiples of 8 those that a product gives.

    inputs    queries, keys and values, or what another mixer makes of its input, but gates and controls
    outputs   what it gives
    gates     of what attention gives
    controls  of a state: what its decays, betas and time steps are made of
    made      of `inputs`, if attention makes fewer: its keys are another layer's, or values, too
    """

    inputs: int = 0
    outputs: int = 0
    gates: int = 0
    controls: int = 0
    made: int = 0


def mixer_sizes(mixer: Mixer | None) -> MixerSizes:
    """Return the sizes of a mixer; all 0 where there is none."""
    match mixer:
        case None:
            return MixerSizes()
        case Attention():
            own, all_heads, made = mixer.queries, mixer.queries + 2 * mixer.keys, made_heads(mixer)
            fewer = made * mixer.head_dim if made * mixer.head_dim < all_heads else 0
            return MixerSizes(all_heads, own, own if mixer.gated else 0, made=fewer)
        case GatedDeltaNet():
            inputs, controls = mixer.convolved + mixer.values, _filled_up(mixer.controls)
            return MixerSizes(_filled_up(inputs), mixer.values, 0, controls)
        case Mamba2():
            inputs, controls = mixer.inner + mixer.convolved, _filled_up(mixer.controls)
            return MixerSizes(_filled_up(inputs), mixer.inner, 0, controls)
        case ShortConv():
            return MixerSizes(_filled_up(3 * mixer.width), mixer.width)
        case LatentAttention():
            outputs = mixer.heads * mixer.value_dim  # `inputs`: queries, in whose room what draws is gathered
            return MixerSizes(max(mixer.heads * mixer.head_dim, outputs), outputs)


def made_heads(attention: Attention) -> int:
    """Heads of a token that a layer's product makes: of queries, and of keys and values if it has its own."""
    if attention.keys_of is not None:
        return attention.heads
    return attention.heads + attention.kv_heads * (1 if attention.values_are_keys else 2)


def last_keeping(spec: ModelSpec) -> int:
    """The last layer that keeps anything of a token: keys and values of its own, or a state."""
    kept = zip(spec.layers, spec.caches, strict=True)
    return max(index for index, (layer, cache) in enumerate(kept) if layer.state or cache is not None)


def has_tail(spec: ModelSpec) -> bool:
    """Return whether layers behind that mix tokens by what others keep: they are for rows that draw alone."""
    return any(layer.mixer is not None for layer in spec.layers[last_keeping(spec) + 1 :])


def only_rotates(attention: Attention) -> bool:
    """Return whether a layer's queries, keys and values are all made by a product, and only rotated then."""
    own = attention.keys_of is None and not attention.values_are_keys and attention.value_norm is None
    return own and attention.qk_norm is None and attention.temperature is None


def _filled_up(size: int) -> int:
    return -(-size // 8) * 8


def layer_kinds(layer: LayerSpec) -> LayerKinds:
    """Return the kinds of a layer's products."""
    ffn, mixer, output, gate_up, down = layer.feed_forward, layer.mixer, None, None, None
    if mixer is not None:
        bias = isinstance(mixer, Attention) and mixer.output_bias
        output = _added(layer, layer.attention_post_norm, bias=bias)
    if isinstance(ffn, FeedForward) and ffn.width:
        gate_up = gate_up_kind(ffn)
        down = _added(layer, layer.feed_forward_post_norm, bias=ffn.bias)
    return LayerKinds(output, gate_up, down)


def gate_up_kind(network: FeedForward) -> Kind:
    """Return the kind of the product of gate and up."""
    fused = (kind for kind, activation in GATED.items() if activation is network.activation)
    return next(fused, Kind.PLAIN) if network.gated and not network.bias else Kind.PLAIN


def _around_experts(experts: Experts) -> set[Kind]:
    """The kinds of the products of a latent and of the shared expert; what is added up later is an ADDEND."""
    kinds = set() if experts.latent is None else {Kind.PLAIN, Kind.ADDEND}
    return kinds if experts.shared is None else kinds | {gate_up_kind(experts.shared), Kind.ADDEND}


def kinds_of(spec: ModelSpec) -> frozenset[Kind]:
    """Return all kinds of products that a model has, but those of experts."""
    found = {kind for layer in spec.layers for kind in layer_kinds(layer) if kind is not None}
    found |= {kind for experts in spec.experts for kind in _around_experts(experts)}
    controls = any(mixer_sizes(layer.mixer).controls for layer in spec.layers)
    adds = controls or spec.layer_inputs is not None
    return frozenset((Kind.PLAIN, Kind.FLOAT, *([Kind.ADDEND] if adds else []))) | found


def _added(layer: LayerSpec, after: Norm | None, *, bias: bool) -> Kind:
    plain = (
        after is None
        and not bias
        and not layer.norms_behind
        and layer.residual_scale == 1.0
        and not layer.output_scale
    )
    return Kind.RESIDUAL if plain else Kind.ADDEND
