"""Families with experts from the keys that llama.cpp's converter writes for them, in small."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    RouterScores,
    ShortConv,
)
from nightmill.worker.runners.gpu.catalogue import check_spec
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.support.ggufs import spec_tensors, write_file
from tests.support.hybrid_cases import (
    ALONE,
    DELTA,
    EPS,
    GATED,
    LAYER,
    MAMBA,
    NORM,
    QWEN35,
    ROPE,
    SSM,
    model,
    with_heads_of_32,
)

KEYS: dict[str, Any] = {
    "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": EPS,
}  # fmt: skip
COUNTS = {"expert_count": 6, "expert_used_count": 2}
PAIRS = replace(ROPE, style=RopeStyle.PAIRS)
EXPERTS = Experts(count=6, used=2, width=48, normalise=True)
SIGMOID = replace(EXPERTS, scores=RouterScores.SIGMOID, selection_bias=True)
SHARED = FeedForward(width=40)
OF_CHOSEN = replace(EXPERTS, scores=RouterScores.SOFTMAX_OF_CHOSEN, normalise=False)
NORMED = replace(LAYER, mixer=replace(LAYER.attention, qk_norm=NORM), feed_forward=EXPERTS)
LLAMA = replace(LAYER, mixer=replace(LAYER.attention, rope=PAIRS), feed_forward=EXPERTS)
SINKS = replace(
    LAYER,
    mixer=replace(
        LAYER.attention, bias=True, output_bias=True, sinks=True,
        rope=replace(
            ROPE, base=1000.0,
            scaling=RopeScaling(kind="yarn", factor=4.0, original_context=64, rounded=False),
        ),
    ),
    feed_forward_norm_name="post_attention_norm",
    feed_forward=replace(
        OF_CHOSEN, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True
    ),
)  # fmt: skip
LOCAL = replace(SINKS, mixer=replace(SINKS.attention, window=20))
GLM = replace(
    LAYER,
    mixer=replace(LAYER.attention, rope=replace(ROPE, dim=8), bias=True),
    feed_forward_norm_name="post_attention_norm",
)
GLM_EXPERTS = replace(GLM, feed_forward=replace(SIGMOID, scale=1.5, shared=SHARED))
SHARED_GATED = replace(EXPERTS, shared=SHARED, shared_gated=True)
NEXT = replace(DELTA, mixer=replace(DELTA.mixer, by_key_head=True), feed_forward=SHARED_GATED)  # type: ignore[type-var]
SQUARED = replace(
    SIGMOID, activation=Activation.RELU_SQUARED, gated=False, scale=2.5, latent=32,
    shared=FeedForward(width=40, activation=Activation.RELU_SQUARED, gated=False),
)  # fmt: skip
FEEDING = LayerSpec(
    attention_norm=None, mixer=None, feed_forward_norm=NORM, feed_forward_norm_name="attn_norm",
    feed_forward=SQUARED,
)  # fmt: skip
LATENT = LatentAttention(
    heads=4, key_dim=16, value_dim=24, latent=24, query_latent=40, norm=NORM, scale=1 / math.sqrt(24),
    rope=Rope(style=RopeStyle.PAIRS, dim=8, base=10_000.0, scaling=RopeScaling(original_context=512)),
)  # fmt: skip
OLDER_SCALING = RopeScaling(kind="yarn", factor=40.0, original_context=64, own_magnitude=1.0)
OLDER = replace(
    LATENT, query_latent=None, fused=True, rope=replace(LATENT.rope, scaling=OLDER_SCALING),
    scale=(1 + 0.0625 * math.log(40)) ** 2 / math.sqrt(24),
)  # fmt: skip
OLDER_NETWORKS = (LAYER.feed_forward, replace(EXPERTS, normalise=False, shared=SHARED))
MLA = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 24, "attention.q_lora_rank": 40,
    "attention.key_length": 32, "attention.value_length": 24, "attention.key_length_mla": 24,
    "attention.value_length_mla": 24, "rope.dimension_count": 8, "leading_dense_block_count": 1,
}  # fmt: skip

_FILES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "qwen3moe": ({"expert_feed_forward_length": 48}, model("qwen3moe", NORMED, NORMED, tied_head=False)),
    "qwen35moe": (
        QWEN35 | {"full_attention_interval": 2, "expert_shared_feed_forward_length": 40},
        model(
            "qwen35moe", replace(DELTA, feed_forward=SHARED_GATED), replace(GATED, feed_forward=SHARED_GATED)
        ),
    ),
    "gpt-oss": (
        {
            "attention.sliding_window": 20, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64, "rope.freq_base": 1000.0,
        },
        model("gpt-oss", LOCAL, SINKS, LOCAL, tied_head=False),
    ),
    "llama": ({}, model("llama", LLAMA, LLAMA)),
    "llama, dense": (
        {"expert_count": None, "expert_used_count": None},
        model("llama", replace(LLAMA, feed_forward=LAYER.feed_forward)),
    ),
    "granitemoe": (
        {"attention.scale": 0.125, "residual_scale": 0.25},
        model(
            "granitemoe",
            replace(
                LLAMA, mixer=replace(LLAMA.attention, scale=0.125), residual_scale=0.25,
                feed_forward=replace(OF_CHOSEN, shared=SHARED),
            ),
        ),
    ),
    "granitehybrid, with experts": (
        SSM | {"attention.head_count_kv": [2, 0]},
        model(
            "granitehybrid", replace(LLAMA, feed_forward=OF_CHOSEN),
            replace(LLAMA, mixer=MAMBA, feed_forward=OF_CHOSEN),
        ),
    ),
    "lfm2moe": (
        {
            "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        model(
            "lfm2moe", replace(LAYER, mixer=ShortConv(width=64, kernel=3)),
            replace(NORMED, feed_forward=SIGMOID), output_norm_name="token_embd_norm",
        ),
    ),
    "olmoe": (
        {},
        model(
            "olmoe",
            replace(
                NORMED, mixer=replace(NORMED.attention, qk_norm_whole=True),
                feed_forward=replace(EXPERTS, normalise=False),
            ),
        ),
    ),
    "nemotron_h_moe": (
        SSM
        | {
            "attention.head_count_kv": [0, 0, 2], "feed_forward_length": [0, 48, 0], "moe_latent_size": 32,
            "expert_weights_scale": 2.5, "expert_weights_norm": True,
        },
        model("nemotron_h_moe", replace(ALONE, mixer=MAMBA), FEEDING, ALONE),
    ),
    "glm4moe": (
        {"rope.dimension_count": 8, "leading_dense_block_count": 1, "expert_weights_scale": 1.5},
        model("glm4moe", GLM, GLM_EXPERTS, GLM_EXPERTS),
    ),
    "ernie4_5-moe": (
        {"leading_dense_block_count": 1, "interleave_moe_layer_step": 2},
        model(
            "ernie4_5-moe",
            *(
                replace(LLAMA, feed_forward=network)
                for network in (
                    LAYER.feed_forward, replace(EXPERTS, selection_bias=True, shared=SHARED),
                    LAYER.feed_forward, replace(EXPERTS, selection_bias=True, shared=SHARED),
                )
            ),
        ),
    ),
    "qwen3next": (
        QWEN35 | {"full_attention_interval": 2},
        model("qwen3next", NEXT, replace(GATED, feed_forward=SHARED_GATED)),
    ),
    "deepseek2": (
        MLA | {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.75},
        model(
            "deepseek2", replace(LAYER, mixer=LATENT),
            replace(LAYER, mixer=LATENT, feed_forward=replace(SIGMOID, scale=1.75, shared=SHARED)),
        ),
    ),
    "deepseek2, older": (
        MLA
        | {
            "attention.q_lora_rank": None, "attention.key_length_mla": None,
            "attention.value_length_mla": None, "attention.key_length": 24, "attention.value_length": 24,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.0625,
            "attention.head_count_kv": 4,
        },
        model("deepseek2", *(replace(LAYER, mixer=OLDER, feed_forward=one) for one in OLDER_NETWORKS)),
    ),
}  # fmt: skip
EXPERT_FILES = {name: (COUNTS | keys, spec) for name, (keys, spec) in _FILES.items()}


def _taken(spec: ModelSpec) -> bool:
    try:
        check_spec(spec)
    except RunnerError:
        return False
    return bool(spec.experts)


_STATES = ("qwen35moe", "qwen3next", "granitehybrid, with experts", "nemotron_h_moe")
_SIZED = {name: with_heads_of_32(file) if name in _STATES else file for name, file in EXPERT_FILES.items()}
GPU_EXPERT_FILES = {name: file for name, file in (_SIZED | GEMMA4_FILES).items() if _taken(file[1])}
"""Those that the CUDA runner computes, in sizes that there are kernels for."""


def file_of(
    path: Path, name: str, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> GgufFile:
    """The file of that name with other keys and tensors; None leaves one out."""
    own, spec = EXPERT_FILES[name]
    merged = {"block_count": len(spec.layers)} | KEYS | own | (keys or {})
    held = {key: value for key, value in (spec_tensors(spec) | (tensors or {})).items() if value is not None}
    return GgufFile.open(write_file(path / "model.gguf", spec.family, merged, held))
