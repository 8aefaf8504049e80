"""Granite, and Granite 4 with Mamba-2 in most layers, both without experts."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.hybrid import attention_layers, kinds_by_heads, mamba2
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LayerSpec, ModelSpec

__all__ = ["granite", "granitehybrid"]

_MAMBA = "Mamba-2"


def granite(keys: Keys) -> ModelSpec:
    """Four scales: of embeddings, what layers add, scores, and logits, which are divided by theirs."""
    return _scaled(keys, _layer(keys, dense_layer(keys, style=RopeStyle.PAIRS)))


def granitehybrid(keys: Keys) -> ModelSpec:
    """Layers without KV heads have Mamba-2; the scales are Granite's."""
    keys.refuse_experts()
    kinds, norm = kinds_by_heads(keys, _MAMBA, "ssm_out.weight"), keys.norm()
    attention = LayerSpec(
        attention_norm=norm,
        mixer=keys.attention(
            RopeStyle.PAIRS, layers=attention_layers(keys, kinds, "attention.head_count_kv")
        ),
        feed_forward_norm=norm,
        feed_forward=keys.feed_forward(),
    )
    layers = {"attention": _layer(keys, attention)}
    if recurrent := [index for index, kind in enumerate(kinds) if kind == _MAMBA]:
        layers[_MAMBA] = replace(layers["attention"], mixer=mamba2(keys, norm, recurrent))
    return _scaled(keys, *(layers[kind] for kind in kinds))


def _layer(keys: Keys, layer: LayerSpec) -> LayerSpec:
    """A layer of attention with Granite's scales."""
    layer = attending(layer, scale=keys.optional("attention.scale"))
    rotates = keys.file.boolean(keys.name("rope.scaling.finetuned"), default=True)  # Granite's use of the key
    if not rotates:
        layer = attending(layer, rope=keys.no_rope(RopeStyle.PAIRS))
    return replace(layer, residual_scale=keys.optional("residual_scale") or 1.0)


def _scaled(keys: Keys, *layers: LayerSpec) -> ModelSpec:
    """A model of these layers in turn, with Granite's scales."""
    return replace(
        dense_model(keys, *layers),
        embedding_scale=keys.optional("embedding_scale") or 1.0,
        logit_scale=1 / keys.positive("logit_scale", 1.0),
    )
