"""Llama, and what is written as it: Mistral, SmolLM2, Yi, ..."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["llama"]


def llama(keys: Keys) -> ModelSpec:
    """The converter permutes queries and keys so that pairs are neighbours; some have biases."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.PAIRS))
