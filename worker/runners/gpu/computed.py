"""Which parts of a spec the kernels compute: a model that has others is refused, not computed wrongly."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from nightmill.worker.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm

__all__ = ["refusal"]


def refusal(spec: ModelSpec) -> str | None:
    """What of a model no kernel computes: names of the spec's fields."""
    names = sorted(set(_differences(spec, _computed(spec))))
    return f"a model with its own {', '.join(names)}" if names else None


def _computed(spec: ModelSpec) -> ModelSpec:
    """What the kernels make of a spec: they know nothing of what is not copied here."""
    return ModelSpec(
        family=spec.family,
        name=spec.name,
        width=spec.width,
        vocab=spec.vocab,
        context_length=spec.context_length,
        layers=tuple(map(_computed_layer, spec.layers)),
        output_norm=_computed_norm(spec.output_norm),
        tied_head=spec.tied_head,
        overflows_half=spec.overflows_half,
    )


def _computed_layer(layer: LayerSpec) -> LayerSpec:
    attention, feed_forward = layer.attention, layer.feed_forward
    return LayerSpec(
        attention_norm=_computed_norm(layer.attention_norm),
        attention=Attention(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            rope=replace(attention.rope, dim=attention.head_dim),
            bias=attention.bias,
            fused=attention.fused,
            qk_norm=None if attention.qk_norm is None else _computed_norm(attention.qk_norm),
            window=attention.window,
            scale=attention.scale,
            softcap=attention.softcap,
        ),
        feed_forward_norm=_computed_norm(layer.feed_forward_norm),
        feed_forward_norm_name=layer.feed_forward_norm_name,
        feed_forward=FeedForward(width=feed_forward.width, fused=feed_forward.fused),
    )


def _computed_norm(norm: Norm | None) -> Norm:
    """There is always one."""
    return Norm(0.0 if norm is None else norm.eps)


def _differences(given: Any, computed: Any) -> Iterator[str]:
    """The names of the innermost fields that differ."""
    for field in fields(given):
        one, other = getattr(given, field.name), getattr(computed, field.name)
        if one == other:
            continue
        pairs = list(zip(one, other, strict=True)) if isinstance(one, tuple) else [(one, other)]
        for pair in pairs:
            if all(map(is_dataclass, pair)):
                yield from _differences(*pair)
            else:
                yield field.name
