"""Command R and Command R7B, but for Command R+, whose heads have norms of their own."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LayerSpec, ModelSpec

__all__ = ["cohere2", "command_r"]


def command_r(keys: Keys) -> ModelSpec:
    """All layers are the same."""
    return _model(keys, _layer(keys))


def cohere2(keys: Keys) -> ModelSpec:
    """Every fourth layer sees all tokens and does not rotate; the others have a window."""
    layer = _layer(keys)
    local = attending(layer, window=keys.window())
    still = attending(layer, rope=keys.no_rope(RopeStyle.PAIRS))
    return _model(keys, *(local if windowed else still for windowed in keys.windowed_layers(4)))


def _layer(keys: Keys) -> LayerSpec:
    """Attention and the feed-forward network read the same LayerNorm."""
    layer = dense_layer(keys, style=RopeStyle.PAIRS, norm=keys.layer_norm())
    return replace(layer, feed_forward_norm=None, parallel=True)


def _model(keys: Keys, *kinds: LayerSpec) -> ModelSpec:
    scale = keys.optional("logit_scale") or 1.0
    return replace(dense_model(keys, *kinds, norm=keys.layer_norm()), logit_scale=scale)
