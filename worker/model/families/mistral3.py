"""Mistral 3: Ministral, and other models whose queries grow with their position."""

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec, Temperature

__all__ = ["mistral3"]


def mistral3(keys: Keys) -> ModelSpec:
    """Steps of the temperature are as long as the context before it was stretched."""
    layer = dense_layer(keys, style=RopeStyle.PAIRS)
    if scale := keys.optional("attention.temperature_scale"):
        original = layer.attention.rope.scaling.original_context
        layer = attending(layer, temperature=Temperature(scale, original))
    return dense_model(keys, layer)
