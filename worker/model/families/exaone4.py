"""EXAONE 4.0."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["exaone4"]


def exaone4(keys: Keys) -> ModelSpec:
    """Norms only after; in the larger model, layers without a window do not rotate."""
    norm = keys.norm()
    layer = replace(
        dense_layer(keys, style=RopeStyle.HALVES, qk_norm=True),
        attention_norm=None,
        attention_post_norm=norm,
        feed_forward_norm=None,
        feed_forward_post_norm=norm,
    )
    window = keys.window()
    if window is None:
        return dense_model(keys, layer)
    local = attending(layer, window=window)
    still = attending(layer, rope=keys.no_rope(RopeStyle.HALVES))
    return dense_model(keys, *(local if windowed else still for windowed in keys.windowed_layers(4)))
