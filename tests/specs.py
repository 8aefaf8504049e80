"""Specs without files: a Qwen2.5-0.5B's, with changes."""

from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm


def dense_spec(
    *,
    name: str = "test",
    layers: int = 1,
    width: int = 896,
    heads: int = 14,
    kv_heads: int = 2,
    head_dim: int = 64,
    ffn_width: int = 4864,
    vocab: int = 1000,
    style: RopeStyle = RopeStyle.HALVES,
    bias: bool = True,
    qk_norm: bool = False,
) -> ModelSpec:
    """Equal layers of attention and SwiGLU, over a tied head."""
    norm = Norm(1e-6)
    layer = LayerSpec(
        attention_norm=norm,
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope(style=style, dim=head_dim, base=1e6),
            bias=bias,
            qk_norm=norm if qk_norm else None,
        ),
        feed_forward_norm=norm,
        feed_forward=FeedForward(width=ffn_width),
    )
    return ModelSpec(
        family="qwen2",
        name=name,
        width=width,
        vocab=vocab,
        context_length=32_768,
        layers=(layer,) * layers,
        output_norm=norm,
        tied_head=True,
    )
