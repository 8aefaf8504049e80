"""Hunyuan, without experts."""

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["hunyuan_dense"]


def hunyuan_dense(keys: Keys) -> ModelSpec:
    """Heads of queries and keys are normed once they are rotated."""
    layer = dense_layer(keys, style=RopeStyle.HALVES, qk_norm=True)
    return dense_model(keys, attending(layer, qk_norm_rotated=True))
