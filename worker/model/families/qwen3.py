"""Qwen3, without experts."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["qwen3"]


def qwen3(keys: Keys) -> ModelSpec:
    """Each head's query and key are normed."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.HALVES, qk_norm=True))
