"""Gemma 4: E2B, E4B, 12B, 31B, and 26B-A4B, which has experts.

Unlike in its predecessors, norms are stored as they are used, and scores are not scaled: the norms of queries
and keys do that.
"""

import math
from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.keys import ROPE_DIVISORS, Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    LayerInputs,
    LayerSpec,
    ModelSpec,
    Norm,
)

__all__ = ["gemma4"]

_DIVISORS = ROPE_DIVISORS[0]


def gemma4(keys: Keys) -> ModelSpec:
    """Layers with a window and layers without have heads, KV heads and rotations of their own.

    The last layers may read the keys and values of the last one before them that is of their kind.
    """
    pattern = keys.name("attention.sliding_window_pattern")
    if pattern not in keys.file:
        keys.file.fail(f"{pattern}: the key is missing: which layers have a window is not known")
    windowed = keys.windowed_layers(1)
    kept = _layers_with_keys(keys)
    attentions: list[Attention] = []
    for index, local in enumerate(windowed):
        keys_of = None if index < kept else _last_of_kind(keys, windowed[:kept], index, local=local)
        attentions.append(_attention(keys, index, local=local, keys_of=keys_of))
        if keys_of is not None and attentions[keys_of].kv_heads != attentions[index].kv_heads:
            keys.file.fail(
                f"{keys.name('attention.head_count_kv')}: layer {index} has {attentions[index].kv_heads}, "
                f"but reads the keys of layer {keys_of}, which has {attentions[keys_of].kv_heads}"
            )
    inputs = _inputs(keys)
    layers = [_layer(keys, index, attention, inputs) for index, attention in enumerate(attentions)]
    model = dense_model(keys, *layers)
    return replace(
        model,
        embedding_scale=math.sqrt(model.width),
        logit_softcap=keys.optional("final_logit_softcapping"),
        suppressed=keys.suppressed(model.vocab),
        overflows_half=True,
    )


def _layers_with_keys(keys: Keys) -> int:
    """Return how many of the first layers make keys and values; files' tensors of others are not used."""
    name, layers = keys.name("attention.shared_kv_layers"), keys.block_count()
    kept = layers - keys.file.integer(name, minimum=0, maximum=layers - 1, default=0)
    for index in range(kept, layers):
        keys.leave_out(*(f"blk.{index}.attn_{part}." for part in ("k", "v", "k_norm")))
    return kept


def _last_of_kind(keys: Keys, windowed: list[bool], index: int, *, local: bool) -> int:
    """The last of these layers that has a window, or that has none."""
    if local not in windowed:
        keys.file.fail(
            f"{keys.name('attention.shared_kv_layers')}: layer {index} is to read the keys of an earlier one "
            f"{'with' if local else 'without'} a window, and there is none"
        )
    return len(windowed) - 1 - windowed[::-1].index(local)


def _attention(keys: Keys, index: int, *, local: bool, keys_of: int | None) -> Attention:
    attention = keys.attention(RopeStyle.HALVES, bias=False, qk_norm=keys.norm(), layers=[index], local=local)
    window = keys.window()
    if local and window is None:
        keys.file.fail(f"{keys.name('attention.sliding_window')}: is missing, but layers have a window")
    if not local and not keys.has_tensor(_DIVISORS):
        keys.file.fail(f"tensor {_DIVISORS}: is missing: which part of a head is rotated is not known")
    return replace(
        attention,
        window=window if local else None,
        scale=1.0,
        value_norm=keys.norm(),
        values_are_keys=keys_of is None and not keys.has_tensor(f"blk.{index}.attn_v.weight"),
        keys_of=keys_of,
    )


def _inputs(keys: Keys) -> LayerInputs | None:
    name = keys.name("embedding_length_per_layer_input")
    width = keys.file.integer(name, minimum=0, maximum=1 << 24, default=0)
    return LayerInputs(width=width, norm=keys.norm()) if width else None


def _layer(keys: Keys, index: int, attention: Attention, inputs: LayerInputs | None) -> LayerSpec:
    norm = keys.norm()
    return LayerSpec(
        attention_norm=norm,
        mixer=attention,
        attention_post_norm=norm,
        feed_forward_norm=norm,
        feed_forward=_network(keys, index, norm),
        feed_forward_post_norm=norm,
        inputs=inputs,
        output_scale=keys.has_tensor(f"blk.{index}.layer_output_scale.weight"),
    )


def _network(keys: Keys, index: int, norm: Norm) -> FeedForward | Experts:
    """A dense network, beside which there may be experts."""
    dense = keys.feed_forward(activation=Activation.GELU, layers=[index])
    if not keys.has_experts or not keys.has_tensor(f"blk.{index}.ffn_gate_inp.weight"):
        return dense
    experts = experts_of(keys, index, activation=Activation.GELU)
    return replace(experts, shared=dense, beside=norm)
