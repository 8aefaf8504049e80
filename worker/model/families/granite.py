"""Granite, with and without experts, and Granite 4 with Mamba-2 in most layers."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.hybrid import attention_layers, kinds_by_heads, mamba2
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Experts, LayerSpec, ModelSpec, RouterScores

__all__ = ["granite", "granitehybrid", "granitemoe"]

_MAMBA = "Mamba-2"


def granite(keys: Keys) -> ModelSpec:
    """Four scales: of embeddings, what layers add, scores, and logits, which are divided by theirs."""
    return _scaled(keys, _layer(keys, dense_layer(keys, style=RopeStyle.PAIRS)))


def granitemoe(keys: Keys) -> ModelSpec:
    """All layers have experts; the scales are Granite's."""
    layers = mixture_layers(keys, keys.attention(RopeStyle.PAIRS), lambda index: _experts(keys, index))
    return _scaled(keys, *(_layer(keys, layer) for layer in layers))


def _experts(keys: Keys, index: int) -> Experts:
    return experts_of(keys, index, scores=RouterScores.SOFTMAX_OF_CHOSEN, normalise=False)


def granitehybrid(keys: Keys) -> ModelSpec:
    """Layers without KV heads have Mamba-2; the scales are Granite's."""
    kinds, norm = kinds_by_heads(keys, _MAMBA, "ssm_out.weight"), keys.norm()
    mixer = keys.attention(RopeStyle.PAIRS, layers=attention_layers(keys, kinds, "attention.head_count_kv"))
    dense = not keys.has_experts
    layers = [
        _layer(keys, layer)
        for layer in mixture_layers(keys, mixer, lambda index: _experts(keys, index), dense=lambda _: dense)
    ]
    if recurrent := [index for index, kind in enumerate(kinds) if kind == _MAMBA]:
        mamba = mamba2(keys, norm, recurrent)
        for index in recurrent:
            layers[index] = replace(layers[index], mixer=mamba)
    return _scaled(keys, *layers)


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
