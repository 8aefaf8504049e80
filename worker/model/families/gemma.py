"""Gemma 2 and the text part of Gemma 3.

The converter adds 1 to the weights of all norms, so that they are plain ones here.
"""

import math
from dataclasses import replace
from typing import Final

from nightmill.worker.model.families.dense import attending, dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Activation, LayerSpec, ModelSpec

__all__ = ["gemma2", "gemma3"]

_LARGEST: Final = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models


def gemma2(keys: Keys) -> ModelSpec:
    """Every second layer sees all tokens, from the second on; scores and logits are capped.

    The first files of this family lack the keys of window and caps: theirs are the defaults.
    """
    whole = _layer(keys, qk_norm=False)
    whole = attending(whole, softcap=keys.optional("attn_logit_softcapping", 50.0))
    local = attending(whole, window=keys.window(default=4096))
    cap = keys.optional("final_logit_softcapping", 30.0)
    return replace(_model(keys, whole, local, period=2), logit_softcap=cap)


def gemma3(keys: Keys) -> ModelSpec:
    """Every sixth layer sees all tokens; the others have a window, and a rotation of their own."""
    whole = _layer(keys, qk_norm=True)
    window, local = keys.window(), whole
    if window is not None:
        rope = keys.local_rope(whole.attention.rope, 10_000.0)
        local = attending(whole, window=window, rope=rope)
    cap = keys.optional("final_logit_softcapping")
    return replace(_model(keys, whole, local, period=6), logit_softcap=cap)


def _layer(keys: Keys, *, qk_norm: bool) -> LayerSpec:
    """GeGLU, and norms after too; no key says that the largest models scale scores by width / heads."""
    layer, norm = dense_layer(keys, style=RopeStyle.HALVES, qk_norm=qk_norm), keys.norm()
    if keys.block_count() == _LARGEST[keys.family]:
        layer = attending(layer, scale=(keys.size("embedding_length") / layer.attention.heads) ** -0.5)
    feed_forward = replace(layer.feed_forward, activation=Activation.GELU)
    return replace(layer, attention_post_norm=norm, feed_forward=feed_forward, feed_forward_post_norm=norm)


def _model(keys: Keys, whole: LayerSpec, local: LayerSpec, *, period: int) -> ModelSpec:
    model = dense_model(keys, *(local if windowed else whole for windowed in keys.windowed_layers(period)))
    return replace(model, embedding_scale=math.sqrt(model.width), overflows_half=True)
