"""Gemma 4 in sizes like those of E2B and of 26B-A4B, as specs with the types of tensors of Q4_K_M files."""

from dataclasses import replace

from nightmill.worker.model.rope import Rope, RopeStyle
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
from tests.support.quantised_models import kinds_of

__all__ = ["GEMMA4_SHAPES", "quantised"]

_NORM = Norm(1e-6)
_VOCAB = 262_144


def _attention(heads: int, kv_heads: int, window: int | None) -> Attention:
    """Heads of 256 with a window, or of 512, of which a quarter rotates, without."""
    head = 512 if window is None else 256
    divisors = (1.0,) * 64 + (1e30,) * 192 if window is None else ()
    rope = Rope(style=RopeStyle.HALVES, dim=head, base=1e6 if window is None else 1e4, divisors=divisors)
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head, rope=rope, qk_norm=_NORM, value_norm=_NORM, scale=1.0,
        window=window,
    )  # fmt: skip


def _layer(attention: Attention, network: FeedForward | Experts, inputs: LayerInputs | None) -> LayerSpec:
    return LayerSpec(
        attention_norm=_NORM, mixer=attention, attention_post_norm=_NORM, feed_forward_norm=_NORM,
        feed_forward=network, feed_forward_post_norm=_NORM, inputs=inputs, output_scale=True,
    )  # fmt: skip


def _model(name: str, width: int, context: int, layers: list[LayerSpec]) -> ModelSpec:
    return ModelSpec(
        family="gemma4", name=name, width=width, vocab=_VOCAB, context_length=context, layers=tuple(layers),
        output_norm=_NORM, tied_head=True, embedding_scale=width**0.5, logit_softcap=30.0,
        overflows_half=True,
    )  # fmt: skip


def _e2b() -> ModelSpec:
    """35 layers, one in five without a window; the last 20 have no keys, and networks twice as wide."""
    narrow, inputs = FeedForward(width=6144, activation=Activation.GELU), LayerInputs(width=256, norm=_NORM)
    layers = []
    for index in range(35):
        whole, own = index % 5 == 4, index < 15
        attention = _attention(8, 1, None if whole else 512)
        if not own:
            attention = replace(attention, keys_of=14 if whole else 13)
        layers.append(_layer(attention, narrow if own else replace(narrow, width=12_288), inputs))
    return _model("gemma4-e2b", 1536, 131_072, layers)


def _a4b() -> ModelSpec:
    """30 layers, one in six without a window, whose values are keys; experts beside a dense network."""
    dense = FeedForward(width=2112, activation=Activation.GELU)
    experts = Experts(
        count=128, used=8, width=704, activation=Activation.GELU, normalise=True, fused=True, shared=dense,
        beside=_NORM, expert_scales=("down",),
    )  # fmt: skip
    whole = replace(_attention(16, 2, None), values_are_keys=True)
    local = _attention(16, 8, 1024)
    layers = [_layer(whole if index % 6 == 5 else local, experts, None) for index in range(30)]
    return _model("gemma4-26b-a4b", 2816, 262_144, layers)


GEMMA4_SHAPES = {spec.name: spec for spec in (_e2b(), _a4b())}


def quantised(spec: ModelSpec, type_name: str = "Q4_K_M") -> ModelSpec:
    """The same with the types of a file's tensors; a table of layers' embeddings is Q5_K."""
    kinds = {name: kind.name for name, kind in kinds_of(spec, type_name).items()}
    tables = {name: "Q5_K" for name in kinds if name.startswith("per_layer_token_embd")}
    return replace(spec, tensor_types=kinds | tables)
