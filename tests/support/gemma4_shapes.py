"""Gemma 4 in the sizes of its models, as keys of a file and a spec, or in smaller ones."""

from dataclasses import dataclass, replace
from typing import Any, Final

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
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

__all__ = ["GEMMA4_SHAPES", "Gemma4Shape"]

_NORM = Norm(2**-20)
_ROTATED: Final = 4  # one pair of so many, in layers without a window
_STILL: Final = 2.0**100  # divides the angles of others


@dataclass(frozen=True, kw_only=True)
class Gemma4Shape:
    """Sizes of a model.

    period    one layer in so many has no window, the last of them
    kv_heads  of layers with a window, and of those without, whose values are their keys if `one_kv`
    heads_of  the sizes of heads in both
    shared    so many last layers read keys of others, and have networks twice as wide if `doubled`
    inputs    the width of layers' own inputs, if they have any
    experts   beside a dense network: their number, how many a token goes through, and their width
    """

    layers: int
    period: int
    width: int
    ffn: int
    heads: int
    kv_heads: tuple[int, int]
    window: int
    heads_of: tuple[int, int] = (256, 512)
    one_kv: bool = False
    shared: int = 0
    doubled: bool = False
    inputs: int | None = None
    experts: tuple[int, int, int] | None = None
    vocab: int = 262_144
    context: int = 131_072

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        local, whole = self.heads_of
        keys: dict[str, Any] = {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.width,
            "feed_forward_length": [self._ffn(index) for index in range(self.layers)],
            "attention.head_count": self.heads, "attention.layer_norm_rms_epsilon": _NORM.eps,
            "attention.head_count_kv": [self.kv_heads[not self._windowed(i)] for i in range(self.layers)],
            "attention.key_length": whole, "attention.value_length": whole,
            "attention.key_length_swa": local, "attention.value_length_swa": local,
            "rope.dimension_count": whole, "rope.dimension_count_swa": local, "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4, "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [self._windowed(index) for index in range(self.layers)],
            "attention.shared_kv_layers": self.shared, "final_logit_softcapping": 30.0,
        }  # fmt: skip
        if self.inputs is not None:
            keys["embedding_length_per_layer_input"] = self.inputs
        if self.experts is not None:
            names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
            keys |= dict(zip(names, self.experts, strict=True))
        return "gemma4", keys, self.spec

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec(
            family="gemma4", name="model", width=self.width, vocab=self.vocab, context_length=self.context,
            layers=tuple(self._layer(index) for index in range(self.layers)), output_norm=_NORM,
            tied_head=True, embedding_scale=self.width**0.5, logit_softcap=30.0, overflows_half=True,
        )  # fmt: skip

    def _windowed(self, index: int) -> bool:
        return index % self.period != self.period - 1

    def _ffn(self, index: int) -> int:
        return self.ffn * (2 if self.doubled and index >= self.layers - self.shared else 1)

    def _layer(self, index: int) -> LayerSpec:
        return LayerSpec(
            attention_norm=_NORM, mixer=self._attention(index), attention_post_norm=_NORM,
            feed_forward_norm=_NORM, feed_forward=self._network(index), feed_forward_post_norm=_NORM,
            inputs=None if self.inputs is None else LayerInputs(width=self.inputs, norm=_NORM),
            output_scale=True,
        )  # fmt: skip

    def _network(self, index: int) -> FeedForward | Experts:
        dense = FeedForward(width=self._ffn(index), activation=Activation.GELU)
        if self.experts is None:
            return dense
        count, used, width = self.experts
        return Experts(
            count=count, used=used, width=width, activation=Activation.GELU, normalise=True, fused=True,
            shared=dense, beside=_NORM, expert_scales=("down",),
        )  # fmt: skip

    def _attention(self, index: int) -> Attention:
        windowed, kept = self._windowed(index), self.layers - self.shared
        head = self.heads_of[not windowed]
        rope = Rope(style=RopeStyle.HALVES, dim=head, base=1e4)
        if not windowed:
            turning = head // 2 // _ROTATED
            divisors = (1.0,) * turning + (_STILL,) * (head // 2 - turning)
            scaling = RopeScaling(original_context=self.context)
            rope = replace(rope, base=1e6, divisors=divisors, scaling=scaling)
        attention = Attention(
            heads=self.heads, kv_heads=self.kv_heads[not windowed], head_dim=head, qk_norm=_NORM,
            value_norm=_NORM, scale=1.0, window=self.window if windowed else None, rope=rope,
        )  # fmt: skip
        if index < kept:
            return replace(attention, values_are_keys=self.one_kv and not windowed)
        own = [one for one in range(kept) if self._windowed(one) is windowed]
        return replace(attention, keys_of=own[-1])


GEMMA4_SHAPES: Final = {
    "gemma4-e2b": Gemma4Shape(
        layers=35, period=5, width=1536, ffn=6144, heads=8, kv_heads=(1, 1), window=512, shared=20,
        doubled=True, inputs=256,
    ),
    "gemma4-e4b": Gemma4Shape(
        layers=42, period=6, width=2560, ffn=10_240, heads=8, kv_heads=(2, 2), window=512, shared=18,
        inputs=256,
    ),
    "gemma4-12b": Gemma4Shape(
        layers=48, period=6, width=3840, ffn=15_360, heads=16, kv_heads=(8, 1), window=1024, one_kv=True,
        context=262_144,
    ),
    "gemma4-31b": Gemma4Shape(
        layers=60, period=6, width=5376, ffn=21_504, heads=32, kv_heads=(16, 4), window=1024, one_kv=True,
        context=262_144,
    ),
    "gemma4-26b-a4b": Gemma4Shape(
        layers=30, period=6, width=2816, ffn=2112, heads=16, kv_heads=(8, 2), window=1024, one_kv=True,
        experts=(128, 8, 704), context=262_144,
    ),
}  # fmt: skip
