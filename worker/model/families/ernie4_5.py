"""ERNIE 4.5, without experts."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["ernie4_5"]


def ernie4_5(keys: Keys) -> ModelSpec:
    """Llama's layers; pairs are neighbours in its own weights."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.PAIRS))
