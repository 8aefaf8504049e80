"""StableLM and StableLM 2, but for the 12B, whose heads have norms of their own."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["stablelm"]


def stablelm(keys: Keys) -> ModelSpec:
    """LayerNorm; without a norm of the feed-forward network, this reads what attention reads."""
    norm = keys.layer_norm()
    layer = dense_layer(keys, style=RopeStyle.HALVES, norm=norm)
    if not keys.has_tensor("blk.0.ffn_norm.weight"):
        layer = replace(layer, feed_forward_norm=None, parallel=True)
    return dense_model(keys, layer, norm=norm)
