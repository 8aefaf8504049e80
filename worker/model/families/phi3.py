"""Phi-3, Phi-3.5 and Phi-4, without experts."""

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["phi3"]


def phi3(keys: Keys) -> ModelSpec:
    """Fused tensors; all layers have the file's window, of which 0 is none."""
    layer = dense_layer(keys, style=RopeStyle.HALVES, fused=True)
    return dense_model(keys, attending(layer, window=keys.window_in_context()))
