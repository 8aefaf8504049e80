"""StarCoder2."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Activation, ModelSpec

__all__ = ["starcoder2"]


def starcoder2(keys: Keys) -> ModelSpec:
    """LayerNorm, and a feed-forward network without a gate."""
    norm = keys.layer_norm()
    layer = dense_layer(keys, style=RopeStyle.HALVES, norm=norm)
    feed_forward = replace(layer.feed_forward, activation=Activation.GELU, gated=False)
    return dense_model(keys, replace(layer, feed_forward=feed_forward), norm=norm)
