"""Real models with mixtures of experts, as keys of a file and a spec: in their own sizes, or smaller ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    Norm,
    RouterScores,
)

__all__ = ["EXPERT_SHAPES", "ExpertShape"]

_NORM = Norm(2**-20)
_SCALE = float(np.float32(1.8))  # of GLM-4.7-Flash, as a file keeps it


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of a model, and what makes layers of them.

    heads    of queries, of keys and values, and their size
    experts  their number, how many a token goes through, and their width
    make     its keys, beside those that all have, and its layers
    """

    family: str
    layers: int
    width: int
    vocab: int
    heads: tuple[int, int, int]
    experts: tuple[int, int, int]
    make: Callable[["ExpertShape"], tuple[dict[str, Any], tuple[LayerSpec, ...]]]
    context: int = 32_768

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        own, layers = self.make(self)
        count, used, width = self.experts
        keys = {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.width,
            "feed_forward_length": width, "attention.head_count": self.heads[0],
            "attention.head_count_kv": self.heads[1], "attention.layer_norm_rms_epsilon": _NORM.eps,
            "attention.key_length": self.heads[2], "attention.value_length": self.heads[2],
            "expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width,
        }  # fmt: skip
        spec = ModelSpec(
            family=self.family, name="model", width=self.width, vocab=self.vocab,
            context_length=self.context, layers=layers, output_norm=_NORM, tied_head=False,
        )  # fmt: skip
        return self.family, keys | own, spec

    def layer(self, experts: dict[str, Any], **attention: Any) -> LayerSpec:
        """A layer of attention and experts, with other fields."""
        heads, kv_heads, size = self.heads
        count, used, width = self.experts
        scaling = RopeScaling(original_context=self.context)
        fields: dict[str, Any] = {
            "rope": Rope(style=RopeStyle.HALVES, dim=size, base=1e6, scaling=scaling),
        }  # fmt: skip
        return LayerSpec(
            attention_norm=_NORM,
            mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=size, **fields | attention),
            feed_forward_norm=_NORM,
            feed_forward=Experts(count=count, used=used, width=width, **experts),
        )


def _qwen3moe(shape: ExpertShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    layer = shape.layer({"normalise": True}, qk_norm=_NORM)
    return {"rope.freq_base": 1e6}, (layer,) * shape.layers


def _gpt_oss(shape: ExpertShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    scaling = RopeScaling(kind="yarn", factor=32.0, original_context=4096, rounded=False)
    rope = Rope(style=RopeStyle.HALVES, dim=shape.heads[2], base=150_000.0, scaling=scaling)
    experts = {
        "activation": Activation.CLAMPED_SWIGLU, "bias": True, "router_bias": True,
        "scores": RouterScores.SOFTMAX_OF_CHOSEN,
    }  # fmt: skip
    whole = shape.layer(experts, rope=rope, bias=True, output_bias=True, sinks=True)
    whole = replace(whole, feed_forward_norm_name="post_attention_norm")
    local = replace(whole, mixer=replace(whole.attention, window=128))
    own = {
        "attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096, "rope.freq_base": 150_000.0,
    }  # fmt: skip
    return own, tuple(whole if index % 2 else local for index in range(shape.layers))


def _flash(shape: ExpertShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    """Latent attention, whose heads have 192 numbers that are not rotated and 64 that are, and values 256."""
    (heads, _, values), rotated, latent, queries, dense = shape.heads, 64, 512, 768, 10_240
    head = 192 + rotated
    mixer = LatentAttention(
        heads=heads, key_dim=head - rotated, value_dim=values, latent=latent, query_latent=queries,
        norm=_NORM, scale=1 / math.sqrt(head),
        rope=Rope(
            style=RopeStyle.PAIRS, dim=rotated, base=1e6, scaling=RopeScaling(original_context=shape.context)
        ),
    )  # fmt: skip
    (_, _, width) = shape.experts
    experts = {
        "scores": RouterScores.SIGMOID, "selection_bias": True, "normalise": True, "scale": _SCALE,
        "shared": FeedForward(width=width),
    }  # fmt: skip
    mixture = replace(shape.layer(experts), mixer=mixer)
    first = replace(mixture, feed_forward=FeedForward(width=dense))
    own = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": latent, "attention.q_lora_rank": queries,
        "attention.key_length": latent + rotated, "attention.value_length": latent,
        "attention.key_length_mla": head, "attention.value_length_mla": values,
        "rope.dimension_count": rotated, "rope.freq_base": 1e6, "feed_forward_length": dense,
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2,
        "expert_weights_norm": True, "expert_weights_scale": _SCALE,
    }  # fmt: skip
    return own, (first, *(mixture,) * (shape.layers - 1))


EXPERT_SHAPES: Final = {
    "qwen3-30b-a3b": ExpertShape(
        family="qwen3moe", layers=48, width=2048, vocab=151_936, heads=(32, 4, 128), experts=(128, 8, 768),
        make=_qwen3moe,
    ),
    "gpt-oss-20b": ExpertShape(
        family="gpt-oss", layers=24, width=2880, vocab=201_088, heads=(64, 8, 64), experts=(32, 4, 2880),
        make=_gpt_oss,
    ),
    "glm-4.7-flash": ExpertShape(
        family="deepseek2", layers=47, width=2048, vocab=154_880, heads=(20, 1, 256), experts=(64, 4, 1536),
        make=_flash,
    ),
}  # fmt: skip
