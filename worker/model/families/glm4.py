"""GLM-4 (0414), without experts."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["glm4"]


def glm4(keys: Keys) -> ModelSpec:
    """Norms after too; gate and up are one tensor, and half of a head is rotated."""
    norm = keys.norm()
    layer = dense_layer(keys, style=RopeStyle.PAIRS, fused=True)
    layer = replace(layer, attention_post_norm=norm, feed_forward_post_norm=norm)
    return replace(dense_model(keys, layer), overflows_half=True)
