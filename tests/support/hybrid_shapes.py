"""Real models whose layers hold states, as keys of a file and a spec: in their own sizes, or smaller ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

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

__all__ = ["HYBRID_SHAPES", "HybridShape"]

_NORM = Norm(2**-20)


@dataclass(frozen=True, kw_only=True)
class HybridShape:
    """Sizes of a model, and what makes layers of them.

    heads     of queries, of keys and values, and their size
    state     heads with a state, those that share what they read, and the sizes of a state
    attends   which layers have attention
    make      its keys, beside those that all have, and its layers
    """

    family: str
    layers: int
    width: int
    ffn: int
    vocab: int
    heads: tuple[int, int, int]
    state: tuple[int, int, int, int]
    attends: tuple[int, ...]
    make: Callable[["HybridShape"], tuple[dict[str, Any], tuple[LayerSpec, ...]]]
    tied: bool = False
    context: int = 32_768

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        own, layers = self.make(self)
        keys = {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.width,
            "feed_forward_length": self.ffn, "attention.head_count": self.heads[0],
            "attention.head_count_kv": self.heads[1], "attention.layer_norm_rms_epsilon": _NORM.eps,
        }  # fmt: skip
        spec = ModelSpec(
            family=self.family, name="model", width=self.width, vocab=self.vocab,
            context_length=self.context, layers=layers, output_norm=_NORM, tied_head=self.tied,
            output_norm_name="token_embd_norm" if self.family == "lfm2" else "output_norm",
        )  # fmt: skip
        return self.family, keys | own, spec

    @property
    def kv_by_layer(self) -> list[int]:
        """The number of heads of keys and values in each layer."""
        return [self.heads[1] if index in self.attends else 0 for index in range(self.layers)]

    def rope(self, **more: Any) -> Rope:
        """The rotation of halves of whole heads, or another."""
        fields: dict[str, Any] = {"style": RopeStyle.HALVES, "dim": self.heads[2], "base": 10_000.0}
        return Rope(**fields | {"scaling": RopeScaling(original_context=self.context)} | more)

    def layer(self, **more: Any) -> LayerSpec:
        """A layer of plain attention and SwiGLU, with other fields."""
        heads, kv_heads, size = self.heads
        fields: dict[str, Any] = {
            "attention_norm": _NORM, "feed_forward_norm": _NORM, "feed_forward": FeedForward(width=self.ffn),
            "mixer": Attention(heads=heads, kv_heads=kv_heads, head_dim=size, rope=self.rope()),
        }  # fmt: skip
        return LayerSpec(**fields | more)

    def in_turn(self, attending: LayerSpec, other: LayerSpec) -> tuple[LayerSpec, ...]:
        """All layers: of attention, or the other kind."""
        return tuple(attending if index in self.attends else other for index in range(self.layers))


def _qwen35(shape: HybridShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    heads, groups, keys, values = shape.state
    rotated = shape.heads[2] // 4
    plain = shape.layer(feed_forward_norm_name="post_attention_norm")
    rope = shape.rope(dim=rotated, base=1e7)
    attention = replace(plain.attention, rope=rope, qk_norm=_NORM, gated=True)
    net = GatedDeltaNet(
        key_heads=groups, value_heads=heads, key_dim=keys, value_dim=values, kernel=4, norm=_NORM
    )
    own = {
        "attention.key_length": shape.heads[2], "attention.value_length": shape.heads[2],
        "rope.dimension_count": rotated, "rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4, "ssm.state_size": keys, "ssm.group_count": groups,
        "ssm.time_step_rank": heads, "ssm.inner_size": heads * values,
    }  # fmt: skip
    return own, shape.in_turn(replace(plain, mixer=attention), replace(plain, mixer=net))


def _lfm2(shape: HybridShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    plain = shape.layer()
    attending = replace(plain, mixer=replace(plain.attention, rope=shape.rope(base=1e6), qk_norm=_NORM))
    own = {
        "attention.head_count_kv": shape.kv_by_layer, "shortconv.l_cache": 3, "rope.freq_base": 1e6,
    }  # fmt: skip
    other = replace(plain, mixer=ShortConv(width=shape.width, kernel=3))
    return own, shape.in_turn(attending, other)


def _mamba(shape: HybridShape) -> tuple[dict[str, Any], Mamba2]:
    heads, groups, size, head = shape.state
    own = {
        "ssm.conv_kernel": 4, "ssm.state_size": size, "ssm.group_count": groups, "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head,
    }  # fmt: skip
    mixer = Mamba2(heads=heads, head_dim=head, groups=groups, state_size=size, kernel=4, norm=_NORM)
    return own, mixer


def _granite(shape: HybridShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    own, mixer = _mamba(shape)
    still = shape.rope(dim=0, style=RopeStyle.PAIRS, scaling=RopeScaling())
    plain = shape.layer()
    attending = replace(plain, mixer=replace(plain.attention, rope=still))
    more = {"attention.head_count_kv": shape.kv_by_layer, "rope.scaling.finetuned": False}
    return own | more, shape.in_turn(attending, replace(plain, mixer=mixer))


def _nemotron(shape: HybridShape) -> tuple[dict[str, Any], tuple[LayerSpec, ...]]:
    """Mamba-2 and feed-forward networks take turns, but where there is attention."""
    own, mixer = _mamba(shape)
    still = shape.rope(dim=0, scaling=RopeScaling())
    alone = shape.layer(feed_forward_norm=None, feed_forward=NO_FEED_FORWARD)
    network = FeedForward(width=shape.ffn, activation=Activation.RELU_SQUARED, gated=False)
    feeding = shape.layer(
        attention_norm=None, mixer=None, feed_forward=network, feed_forward_norm_name="attn_norm"
    )
    feeds = [index % 2 == 1 and index not in shape.attends for index in range(shape.layers)]
    attending = replace(alone, mixer=replace(alone.attention, rope=still))
    others = shape.in_turn(attending, replace(alone, mixer=mixer))
    more = {
        "attention.head_count_kv": shape.kv_by_layer,
        "attention.key_length": shape.heads[2], "attention.value_length": shape.heads[2],
        "feed_forward_length": [shape.ffn if feed else 0 for feed in feeds],
        "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": _NORM.eps,
    }  # fmt: skip
    return own | more, tuple(feeding if feed else one for feed, one in zip(feeds, others, strict=True))


HYBRID_SHAPES: Final = {
    "qwen3.5-0.8b": HybridShape(
        family="qwen35", layers=24, width=1024, ffn=3584, vocab=248_320, heads=(8, 2, 256),
        state=(16, 16, 128, 128), attends=tuple(range(3, 24, 4)), make=_qwen35, tied=True,
    ),
    "qwen3.5-9b": HybridShape(
        family="qwen35", layers=32, width=4096, ffn=12_288, vocab=248_320, heads=(16, 4, 256),
        state=(32, 16, 128, 128), attends=tuple(range(3, 32, 4)), make=_qwen35,
    ),
    "lfm2-1.2b": HybridShape(
        family="lfm2", layers=16, width=2048, ffn=8192, vocab=65_536, heads=(32, 8, 64), state=(0, 0, 0, 0),
        attends=(2, 5, 8, 10, 12, 14), make=_lfm2, tied=True,
    ),
    "granite-4-h-micro": HybridShape(
        family="granitehybrid", layers=40, width=2048, ffn=8192, vocab=100_352, heads=(32, 8, 64),
        state=(64, 1, 128, 64), attends=(5, 15, 25, 35), make=_granite, tied=True,
    ),
    "nemotron-nano-9b-v2": HybridShape(
        family="nemotron_h", layers=56, width=4480, ffn=15_680, vocab=131_072, heads=(40, 8, 128),
        state=(128, 8, 128, 80), attends=(14, 21, 30, 39), make=_nemotron,
    ),
}  # fmt: skip
"""By name; multipliers of Granite are left out, since weights are random."""
