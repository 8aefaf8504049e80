"""Real models with mixtures of experts, as keys of a file and a spec: in their own sizes, or smaller ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Experts,
    LayerSpec,
    ModelSpec,
    Norm,
    RouterScores,
)

__all__ = ["EXPERT_SHAPES", "ExpertShape"]

_NORM = Norm(2**-20)


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


EXPERT_SHAPES: Final = {
    "qwen3-30b-a3b": ExpertShape(
        family="qwen3moe", layers=48, width=2048, vocab=151_936, heads=(32, 4, 128), experts=(128, 8, 768),
        make=_qwen3moe,
    ),
    "gpt-oss-20b": ExpertShape(
        family="gpt-oss", layers=24, width=2880, vocab=201_088, heads=(64, 8, 64), experts=(32, 4, 2880),
        make=_gpt_oss,
    ),
}  # fmt: skip
