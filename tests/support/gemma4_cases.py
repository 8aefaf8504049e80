"""Gemma 4 in small, from the keys that llama.cpp's converter writes: with inputs of layers, with experts."""

from dataclasses import replace
from typing import Any

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    LayerInputs,
    LayerSpec,
    ModelSpec,
)
from tests.support.hybrid_cases import NORM, model

_LOCAL = Attention(
    heads=4, kv_heads=2, head_dim=16, qk_norm=NORM, value_norm=NORM, scale=1.0, window=100,
    rope=Rope(style=RopeStyle.HALVES, dim=16, base=5000.0),
)  # fmt: skip
_WHOLE = replace(
    _LOCAL, head_dim=32, window=None,
    rope=Rope(
        style=RopeStyle.HALVES, dim=32, base=1e6, divisors=(1.0,) * 4 + (2.0**100,) * 12,
        scaling=RopeScaling(original_context=512),
    ),
)  # fmt: skip
_DENSE = FeedForward(width=96, activation=Activation.GELU)
_WIDE = replace(_DENSE, width=192)
_BESIDE = Experts(
    count=6, used=2, width=48, activation=Activation.GELU, normalise=True, fused=True, shared=_DENSE,
    beside=NORM, expert_scales=("down",),
)  # fmt: skip
_INPUTS = LayerInputs(width=24, norm=NORM)


def _layer(
    attention: Attention, network: FeedForward | Experts, inputs: LayerInputs | None, *, scaled: bool = True
) -> LayerSpec:
    return LayerSpec(
        attention_norm=NORM, mixer=attention, attention_post_norm=NORM, feed_forward_norm=NORM,
        feed_forward=network, feed_forward_post_norm=NORM, inputs=inputs, output_scale=scaled,
    )  # fmt: skip


def _model(*layers: LayerSpec) -> ModelSpec:
    return model("gemma4", *layers, embedding_scale=8.0, logit_softcap=30.0, overflows_half=True)


_LARGE_LOCAL = replace(
    _LOCAL, heads=8, kv_heads=1, head_dim=256, window=48, scale=1 / 16,
    rope=Rope(style=RopeStyle.HALVES, dim=256, base=1e4),
)  # fmt: skip
_LARGE_WHOLE = replace(
    _LARGE_LOCAL, head_dim=512, window=None,
    rope=Rope(style=RopeStyle.HALVES, dim=512, base=1e6, divisors=(1.0,) * 64 + (2.0**100,) * 192),
)  # fmt: skip
LARGE_HEADS = _model(
    _layer(_LARGE_LOCAL, _DENSE, _INPUTS),
    _layer(replace(_LARGE_WHOLE, values_are_keys=True), _DENSE, _INPUTS),
    _layer(replace(_LARGE_LOCAL, keys_of=0), _WIDE, _INPUTS),
    _layer(replace(_LARGE_WHOLE, keys_of=1), _WIDE, _INPUTS),
)
"""Heads as large as real ones, in few layers."""
LARGE_EXPERTS = _model(
    _layer(replace(_LARGE_LOCAL, kv_heads=4), _BESIDE, None),
    _layer(replace(_LARGE_WHOLE, kv_heads=2, values_are_keys=True), _BESIDE, None),
)
"""The same beside experts, as 26B-A4B has them: KV heads are two queries' with a window, four's without."""

_KEYS: dict[str, Any] = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 5000.0, "attention.sliding_window": 100,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_FILES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "gemma4": (
        _KEYS
        | {
            "feed_forward_length": [96, 96, 96, 192, 192], "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 24,
            "attention.sliding_window_pattern": [True, True, False, True, False],
        },
        _model(
            _layer(_LOCAL, _DENSE, _INPUTS),
            _layer(_LOCAL, _DENSE, _INPUTS),
            _layer(_WHOLE, _DENSE, _INPUTS),
            _layer(replace(_LOCAL, keys_of=1), _WIDE, _INPUTS),
            _layer(replace(_WHOLE, keys_of=2), _WIDE, _INPUTS),
        ),
    ),
    "gemma4, with experts": (
        _KEYS
        | {
            "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 48,
            "attention.head_count_kv": [2, 2, 1], "attention.sliding_window_pattern": [True, True, False],
        },
        _model(
            _layer(_LOCAL, _BESIDE, None, scaled=False),
            _layer(_LOCAL, _BESIDE, None),
            _layer(replace(_WHOLE, kv_heads=1, values_are_keys=True), _BESIDE, None),
        ),
    ),
}  # fmt: skip
