"""Encoders from the keys that llama.cpp's converter writes, in small, as `family_cases` has others."""

from dataclasses import replace
from typing import Any

from nightmill.worker.model.encoder import Encoder
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import Activation, LayerSpec, ModelSpec, Norm, Pooling
from tests.support.family_cases import BASED, EPS, HALVES, layer, model

__all__ = ["ENCODER_FILES"]

CONTEXT = 160
KEYS = {
    "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": EPS, "attention.causal": False,
    "attention.head_count_kv": None, "context_length": CONTEXT,
}  # fmt: skip
WITH_BIAS, WITHOUT = Norm(EPS, centred=True, bias=True), Norm(EPS, centred=True)
NO_ROPE = Rope(style=RopeStyle.HALVES, dim=0, base=10_000.0)
ALL: dict[str, Any] = {"kv_heads": 4, "causal": False}
BEHIND = {
    "attention_norm": WITH_BIAS, "attention_norm_name": "attn_output_norm",
    "feed_forward_norm": WITH_BIAS, "feed_forward_norm_name": "layer_output_norm", "norms_behind": True,
}  # fmt: skip
BIASES = {"bias": True, "output_bias": True}


def encoding(rope: Rope, **more: Any) -> LayerSpec:
    """A layer whose tokens see all others, with as many heads of keys as of queries."""
    one = layer(rope, **more)
    return replace(one, mixer=replace(one.attention, **ALL))


def encoder(family: str, *layers: LayerSpec, pooling: Pooling, **parts: Any) -> ModelSpec:
    """A model of these layers; the last norm of the last one is the model's if norms stand behind."""
    norm, name, layers_ = WITHOUT, "output_norm", list(layers)
    if layers[-1].norms_behind:
        norm, name = WITH_BIAS, f"blk.{len(layers) - 1}.layer_output_norm"
        layers_[-1] = replace(layers[-1], feed_forward_norm=None)
    own = Encoder(norm=norm, **parts)
    return model(
        family, *layers_, output_norm=norm, output_norm_name=name, pooling=pooling, encoder=own,
        context_length=CONTEXT,
    )  # fmt: skip


BERT = encoding(
    NO_ROPE,
    feed_forward={"activation": Activation.GELU_ERF, "gated": False, "bias": True},
    **BIASES,
    **BEHIND,
)
NOMIC = encoding(replace(HALVES, scaling=replace(HALVES.scaling, original_context=CONTEXT)), **BEHIND)
MODERN = encoding(
    replace(NOMIC.attention.rope, base=160_000.0), fused=True,
    feed_forward={"activation": Activation.GELU_ERF, "fused": True},
    attention_norm=WITHOUT, feed_forward_norm=WITHOUT,
)  # fmt: skip
LOCAL = replace(
    MODERN,
    mixer=replace(
        MODERN.attention, window=20, rope=Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0)
    ),
)  # fmt: skip

ENCODER_FILES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "bert": (
        KEYS | {"pooling_type": 2},
        encoder("bert", BERT, BERT, pooling=Pooling.CLS, positions=CONTEXT, token_types=2),
    ),
    "nomic-bert": (
        KEYS | BASED | {"pooling_type": 1},
        encoder("nomic-bert", NOMIC, NOMIC, pooling=Pooling.MEAN, token_types=2),
    ),
    "modern-bert": (
        KEYS | {"pooling_type": 1, "rope.freq_base": 160_000.0, "attention.sliding_window": 20},
        encoder(
            "modern-bert", replace(MODERN, attention_norm=None), LOCAL, LOCAL, MODERN, pooling=Pooling.MEAN
        ),
    ),
}
"""Keys of a file, and the spec that it says, by family."""
