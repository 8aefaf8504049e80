"""Real encoders in their own sizes, as keys of a file and a spec: their weights are random."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from nightmill.worker.model.encoder import Encoder
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    FeedForward,
    LayerSpec,
    ModelSpec,
    Norm,
    Pooling,
)

__all__ = ["ENCODER_SHAPES", "EncoderShape"]

_NORM: Final = Norm(2**-30, centred=True, bias=True)
_NO_ROPE: Final = Rope(style=RopeStyle.HALVES, dim=0, base=10_000.0)


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """Sizes of a BERT whose embedding is the hidden state of its first token."""

    layers: int
    width: int
    ffn: int
    heads: int
    vocab: int = 30_522
    context: int = 512

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        keys = {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.width,
            "feed_forward_length": self.ffn, "attention.head_count": self.heads,
            "attention.layer_norm_epsilon": _NORM.eps, "attention.causal": False,
            "pooling_type": 2,
        }  # fmt: skip
        layer = LayerSpec(
            attention_norm=_NORM,
            attention_norm_name="attn_output_norm",
            mixer=Attention(
                heads=self.heads, kv_heads=self.heads, head_dim=self.width // self.heads, rope=_NO_ROPE,
                causal=False, bias=True, output_bias=True,
            ),
            feed_forward_norm=_NORM,
            feed_forward_norm_name="layer_output_norm",
            feed_forward=FeedForward(width=self.ffn, activation=Activation.GELU_ERF, gated=False, bias=True),
            norms_behind=True,
        )  # fmt: skip
        layers = (layer,) * (self.layers - 1) + (replace(layer, feed_forward_norm=None),)
        spec = ModelSpec(
            family="bert", name="model", width=self.width, vocab=self.vocab, context_length=self.context,
            layers=layers, output_norm=_NORM,
            output_norm_name=f"blk.{self.layers - 1}.layer_output_norm", tied_head=True, pooling=Pooling.CLS,
            encoder=Encoder(norm=_NORM, positions=self.context, token_types=2),
        )  # fmt: skip
        return "bert", keys, spec


ENCODER_SHAPES: Final[Mapping[str, EncoderShape]] = {
    "minilm-l6": EncoderShape(layers=6, width=384, ffn=1536, heads=12),
    "bge-base": EncoderShape(layers=12, width=768, ffn=3072, heads=12),
    "bge-large": EncoderShape(layers=24, width=1024, ffn=4096, heads=16),
}
