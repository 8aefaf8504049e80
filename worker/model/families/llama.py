"""Llama, and what is written as it: Mistral, Mixtral, SmolLM2, Yi, ..."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["llama"]


def llama(keys: Keys) -> ModelSpec:
    """The converter permutes queries and keys so that pairs are neighbours; some have biases."""
    if not keys.has_experts:
        return dense_model(keys, dense_layer(keys, style=RopeStyle.PAIRS))
    attention = keys.attention(RopeStyle.PAIRS)
    return dense_model(keys, *mixture_layers(keys, attention, lambda index: experts_of(keys, index)))
