"""OLMo 2 and OLMo 3."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["olmo2"]


def olmo2(keys: Keys) -> ModelSpec:
    """Norms only after, and over all heads of queries and keys; OLMo 3 has layers with a window."""
    layer, norm = dense_layer(keys, style=RopeStyle.HALVES, qk_norm=True), keys.norm()
    whole = replace(
        layer,
        attention_norm=None,
        mixer=replace(layer.attention, qk_norm_whole=True),
        attention_post_norm=norm,
        feed_forward_norm=None,
        feed_forward_post_norm=norm,
    )
    window = keys.window()
    if window is None:
        return dense_model(keys, whole)
    rope = keys.local_rope(whole.attention.rope, whole.attention.rope.base)
    local = attending(whole, window=window, rope=rope)
    return dense_model(keys, *(local if windowed else whole for windowed in keys.windowed_layers(4)))
