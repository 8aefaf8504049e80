"""Families with states from the keys that llama.cpp's converter writes for them, in small."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    NO_FEED_FORWARD,
    Activation,
    Attention,
    FeedForward,
    GatedDeltaNet,
    LayerSpec,
    Mamba2,
    ModelSpec,
    Norm,
    ShortConv,
)
from tests.support.ggufs import byte_vocabulary

EPS = 2**-20
STATES_OF_32 = {"ssm.state_size": 32, "ssm.inner_size": 192}
NORM = Norm(EPS)
KEYS: dict[str, Any] = {
    "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": EPS,
}  # fmt: skip
ROPE = Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0, scaling=RopeScaling(original_context=512))
LAYER = LayerSpec(
    attention_norm=NORM,
    mixer=Attention(heads=4, kv_heads=2, head_dim=16, rope=ROPE),
    feed_forward_norm=NORM,
    feed_forward=FeedForward(width=96),
)
GATED = replace(
    LAYER,
    mixer=replace(LAYER.attention, head_dim=32, rope=replace(ROPE, dim=8), qk_norm=NORM, gated=True),
    feed_forward_norm_name="post_attention_norm",
)
DELTA = replace(
    GATED, mixer=GatedDeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=24, kernel=4, norm=NORM)
)
QWEN35 = {
    "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 6, "ssm.inner_size": 144,
}  # fmt: skip
SSM = {
    "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.time_step_rank": 6,
    "ssm.inner_size": 120,
}  # fmt: skip
MAMBA = Mamba2(heads=6, head_dim=20, groups=2, state_size=24, kernel=4, norm=NORM)
STILL = replace(ROPE, dim=0, scaling=RopeScaling())
ALONE = replace(
    LAYER,
    mixer=replace(LAYER.attention, rope=STILL),
    feed_forward_norm=None,
    feed_forward=NO_FEED_FORWARD,
)
FEEDING = LayerSpec(
    attention_norm=None,
    mixer=None,
    feed_forward_norm=NORM,
    feed_forward_norm_name="attn_norm",
    feed_forward=FeedForward(width=96, activation=Activation.RELU_SQUARED, gated=False),
)
NEMOTRON = (replace(ALONE, mixer=MAMBA), FEEDING, replace(ALONE, mixer=MAMBA), ALONE, FEEDING)
GRANITE = replace(
    LAYER, mixer=replace(LAYER.attention, rope=replace(STILL, style=RopeStyle.PAIRS), scale=0.125),
    residual_scale=0.25,
)  # fmt: skip


def model(family: str, *layers: LayerSpec, **more: Any) -> ModelSpec:
    """A model of width 64 with a tied head, with other fields."""
    fields: dict[str, Any] = {
        "family": family, "name": "model", "width": 64, "vocab": len(byte_vocabulary().tokens),
        "context_length": 512, "layers": layers, "output_norm": NORM, "tied_head": True,
    }  # fmt: skip
    return ModelSpec(**(fields | more))


HYBRID_FILES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "qwen35": (
        QWEN35 | {"full_attention_interval": 3}, model("qwen35", DELTA, DELTA, GATED, DELTA, DELTA),
    ),
    "qwen35, interval of 4 by default": (QWEN35, model("qwen35", *[DELTA] * 3, GATED, tied_head=False)),
    "lfm2": (
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
        model(
            "lfm2",
            *(
                replace(LAYER, mixer=mixer)
                for mixer in (
                    ShortConv(width=64, kernel=3), replace(LAYER.attention, qk_norm=NORM),
                    ShortConv(width=64, kernel=3),
                )
            ),
            output_norm_name="token_embd_norm",
        ),
    ),
    "granitehybrid": (
        SSM
        | {
            "attention.head_count_kv": [0, 2, 0], "embedding_scale": 8.0, "residual_scale": 0.25,
            "attention.scale": 0.125, "logit_scale": 4.0, "rope.scaling.finetuned": False,
        },
        model(
            "granitehybrid", replace(GRANITE, mixer=MAMBA), GRANITE, replace(GRANITE, mixer=MAMBA),
            embedding_scale=8.0, logit_scale=0.25,
        ),
    ),
    "granitehybrid, with positions and without biases": (
        SSM | {"attention.head_count_kv": [2, 0]},
        model(
            "granitehybrid",
            replace(LAYER, mixer=replace(LAYER.attention, rope=replace(ROPE, style=RopeStyle.PAIRS))),
            replace(LAYER, mixer=replace(MAMBA, convolution_bias=False)),
        ),
    ),
    "nemotron_h": (
        SSM
        | {
            "attention.head_count_kv": [0, 0, 0, 2, 0], "feed_forward_length": [0, 96, 0, 0, 96],
            "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": EPS,
        },
        model("nemotron_h", *NEMOTRON, tied_head=False),
    ),
}  # fmt: skip


def with_heads_of_32(
    file: tuple[dict[str, Any], ModelSpec], keys: Mapping[str, Any] = STATES_OF_32
) -> tuple[dict[str, Any], ModelSpec]:
    """A file whose states have heads of 32; `keys` say so."""
    own, spec = file

    def sized(layer: LayerSpec) -> LayerSpec:
        match layer.mixer:
            case GatedDeltaNet():
                return replace(layer, mixer=replace(layer.mixer, key_dim=32, value_dim=32))
            case Mamba2():
                return replace(layer, mixer=replace(layer.mixer, head_dim=32, state_size=32))
            case _:
                return layer

    return own | dict(keys), replace(spec, layers=tuple(map(sized, spec.layers)))


GPU_HYBRID_FILES = {
    name: file if name == "lfm2" else with_heads_of_32(file) for name, file in HYBRID_FILES.items()
}
"""The same in sizes that there are kernels for."""
