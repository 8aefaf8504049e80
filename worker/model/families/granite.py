"""Granite, without experts."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["granite"]


def granite(keys: Keys) -> ModelSpec:
    """Four scales: of embeddings, what layers add, scores, and logits, which are divided by theirs."""
    layer = dense_layer(keys, style=RopeStyle.PAIRS)
    layer = attending(layer, scale=keys.optional("attention.scale"))
    rotates = keys.file.boolean(keys.name("rope.scaling.finetuned"), default=True)  # Granite's use of the key
    if not rotates:
        layer = attending(layer, rope=keys.no_rope(RopeStyle.PAIRS))
    layer = replace(layer, residual_scale=keys.optional("residual_scale") or 1.0)
    return replace(
        dense_model(keys, layer),
        embedding_scale=keys.optional("embedding_scale") or 1.0,
        logit_scale=1 / keys.positive("logit_scale", 1.0),
    )
