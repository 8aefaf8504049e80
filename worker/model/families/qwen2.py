"""Qwen2 and Qwen2.5."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["qwen2"]


def qwen2(keys: Keys) -> ModelSpec:
    """Queries, keys and values have biases."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.HALVES, bias=True))
