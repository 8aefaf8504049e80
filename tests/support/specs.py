"""Specs without files: a Qwen2.5-0.5B's, with changes; and small ones of all kinds."""

from dataclasses import replace
from typing import Any

from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    NO_FEED_FORWARD,
    Activation,
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    LayerInputs,
    LayerSpec,
    Mamba2,
    Mixer,
    ModelSpec,
    Norm,
    RouterScores,
    ShortConv,
    Temperature,
)


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
        mixer=Attention(
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


NORM, ROPE = Norm(1e-5), Rope(style=RopeStyle.HALVES, dim=16, base=10_000.0)
CENTRED = Norm(1e-5, centred=True, bias=True)
PLAIN = replace(
    dense_spec(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn_width=96, vocab=400),
    tied_head=False,
)


def variant(
    *, attention: dict[str, Any] | None = None, feed_forward: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None, **model: Any,
) -> ModelSpec:  # fmt: skip
    """PLAIN with other parts in all layers."""
    plain = PLAIN.layers[0]
    parts = {
        "mixer": replace(plain.attention, **(attention or {})),
        "feed_forward": replace(plain.feed_forward, **(feed_forward or {})),
    }
    return replace(PLAIN, layers=(replace(plain, **parts, **(layer or {})),) * 2, **model)


VARIANTS = {
    "window": variant(attention={"window": 20}),
    "window, then all": replace(PLAIN, layers=(variant(attention={"window": 9}).layers[0], PLAIN.layers[0])),
    "soft-caps": variant(attention={"softcap": 2.0, "scale": 0.5}, logit_softcap=4.0),
    "scales": variant(layer={"residual_scale": 0.4}, embedding_scale=8.0, logit_scale=0.25),
    "norms after too": variant(layer={"attention_post_norm": NORM, "feed_forward_post_norm": NORM}),
    "norms after alone": variant(
        layer={
            "attention_norm": None, "attention_post_norm": NORM,
            "feed_forward_norm": None, "feed_forward_post_norm": NORM,
        },
        attention={"qk_norm": NORM},
    ),
    "both at once": variant(layer={"parallel": True, "feed_forward_norm": None}),
    "temperature": variant(attention={"temperature": Temperature(0.3, 10)}),
    "norms after rotation": variant(attention={"qk_norm": NORM, "qk_norm_rotated": True}),
    "norms of whole Q and K": variant(
        attention={"qk_norm": NORM, "qk_norm_whole": True},
    ),
    "GeGLU": variant(feed_forward={"activation": Activation.GELU}),
    "LayerNorm, no gate, biases": variant(
        attention={"output_bias": True},
        feed_forward={"activation": Activation.GELU, "gated": False, "bias": True},
        layer={"attention_norm": CENTRED, "feed_forward_norm": CENTRED}, output_norm=CENTRED,
    ),
    "gate with biases": variant(feed_forward={"bias": True}),
    "fused tensors": variant(attention={"fused": True}, feed_forward={"fused": True}),
    "half of a head rotated": variant(attention={"rope": replace(ROPE, dim=8)}),
    "and in pairs": variant(attention={"rope": replace(ROPE, dim=8, style=RopeStyle.PAIRS)}),
    "no rotation": variant(attention={"rope": replace(ROPE, dim=0)}),
    "sinks": replace(
        PLAIN,
        layers=tuple(variant(attention={"sinks": True, "window": one}).layers[0] for one in (9, None)),
    ),
}  # fmt: skip
"""PLAIN with what a spec can say beyond the families that there are, each alone."""


def mixing(mixer: Mixer, **attention: Any) -> ModelSpec:
    """PLAIN with a layer of this mixer before, between and after its own."""
    plain = variant(attention=attention).layers[0]
    other = replace(plain, mixer=mixer)
    return replace(PLAIN, layers=(other, plain, other, plain, other))


_MAMBA = Mamba2(heads=6, head_dim=20, groups=2, state_size=24, kernel=4, norm=NORM)
_ALONE = replace(PLAIN.layers[0], feed_forward_norm=None, feed_forward=NO_FEED_FORWARD)
_FEEDING = LayerSpec(
    attention_norm=None,
    mixer=None,
    feed_forward_norm=NORM,
    feed_forward_norm_name="attn_norm",
    feed_forward=FeedForward(width=96, activation=Activation.RELU_SQUARED, gated=False),
)
HYBRIDS = {
    "a gated delta net": mixing(
        GatedDeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=24, kernel=4, norm=NORM), gated=True
    ),
    "Mamba-2": mixing(_MAMBA),
    "Mamba-2 without biases": mixing(replace(_MAMBA, groups=1, convolution_bias=False)),
    "a short convolution": mixing(ShortConv(width=48, kernel=3), qk_norm=NORM),
    "one part in a layer": replace(
        PLAIN,
        layers=(replace(_ALONE, mixer=_MAMBA), _FEEDING, _ALONE, _FEEDING, replace(_ALONE, mixer=_MAMBA)),
    ),
}
"""Specs of which some layers have no attention, or nothing else."""


def mixture(experts: Experts, **attention: Any) -> ModelSpec:
    """PLAIN with these experts in each layer, and other fields of attention."""
    layer = variant(attention=attention).layers[0]
    return replace(PLAIN, layers=(replace(layer, feed_forward=experts),) * 2)


_LATENT = LatentAttention(
    heads=4, key_dim=24, value_dim=20, latent=40, query_latent=36, norm=NORM, scale=0.2,
    rope=Rope(style=RopeStyle.PAIRS, dim=8, base=10_000.0),
)  # fmt: skip
MIXTURES = {
    "experts and a shared one": mixture(
        Experts(
            count=7, used=3, width=40, normalise=True, expert_scales=("gate", "up", "down"),
            shared=FeedForward(width=24), shared_gated=True,
        )
    ),
    "experts of gpt-oss, with sinks": mixture(
        Experts(
            count=6, used=2, width=40, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True,
            scores=RouterScores.SOFTMAX_OF_CHOSEN,
        ),
        sinks=True,
    ),
    "experts in groups, of a latent": mixture(
        Experts(
            count=8, used=3, width=40, activation=Activation.RELU_SQUARED, gated=False,
            scores=RouterScores.SIGMOID, selection_bias=True, groups=4, groups_used=2, normalise=True,
            scale=2.5, latent=32, expert_scales=("up", "down"),
            shared=FeedForward(width=24, activation=Activation.RELU_SQUARED, gated=False),
        )
    ),
    "fused experts, latent attention": replace(
        PLAIN,
        layers=(
            replace(PLAIN.layers[0], mixer=_LATENT),
            replace(
                PLAIN.layers[0], mixer=replace(_LATENT, query_latent=None, fused=True),
                feed_forward=Experts(count=8, used=2, width=40, fused=True, groups=2, groups_used=1),
            ),
        ),
    ),
}  # fmt: skip
"""Specs with mixtures of experts, sinks, or latent attention."""

_BOTH_NORMS: dict[str, Any] = {
    "attention_post_norm": NORM, "feed_forward_post_norm": NORM, "output_scale": True,
}  # fmt: skip
_LOCAL = Attention(
    heads=4, kv_heads=2, head_dim=16, rope=ROPE, qk_norm=NORM, value_norm=NORM, scale=0.5, window=20
)
_WHOLE = replace(
    _LOCAL, head_dim=24, kv_heads=1, window=None,
    rope=replace(ROPE, dim=24, base=1e6, divisors=(1.0,) * 3 + (2.0**100,) * 9),
)  # fmt: skip
_GELU = FeedForward(width=96, activation=Activation.GELU)


def _gemma4(attention: Attention, network: FeedForward | Experts, inputs: LayerInputs | None) -> LayerSpec:
    return LayerSpec(
        attention_norm=NORM, mixer=attention, feed_forward_norm=NORM, feed_forward=network, inputs=inputs,
        **_BOTH_NORMS,
    )  # fmt: skip


_BESIDE = Experts(
    count=7, used=3, width=40, activation=Activation.GELU, normalise=True, fused=True, beside=NORM,
    shared=_GELU, expert_scales=("down",),
)  # fmt: skip
GEMMAS = {
    "layers that read others' keys": replace(
        PLAIN,
        layers=tuple(
            _gemma4(attention, network, LayerInputs(width=24, norm=NORM))
            for attention, network in (
                (_LOCAL, _GELU),
                (_WHOLE, _GELU),
                (replace(_LOCAL, keys_of=0), replace(_GELU, width=128)),
                (replace(_WHOLE, keys_of=1), replace(_GELU, width=128)),
            )
        ),
        embedding_scale=8.0,
        logit_softcap=4.0,
    ),
    "keys as values, experts beside": replace(
        PLAIN,
        layers=tuple(
            _gemma4(attention, _BESIDE, None)
            for attention in (_LOCAL, replace(_WHOLE, values_are_keys=True), _LOCAL)
        ),
    ),
}
"""Specs of what Gemma 4 has beyond the others: dense ones, and one with experts."""
