"""gpt-oss."""

from dataclasses import replace

from nightmill.worker.model.families.dense import attending, dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Activation, ModelSpec, RouterScores

__all__ = ["gpt_oss"]


def gpt_oss(keys: Keys) -> ModelSpec:
    """Heads have sinks; the first of each two layers has a window.

    YaRN's ramp ends between pairs (`truncate: false` in the model's configuration). Files have no key for
    that, and llama.cpp rounds them.
    """
    attention = keys.attention(RopeStyle.HALVES)
    scaling = replace(attention.rope.scaling, rounded=False)
    attention = replace(attention, rope=replace(attention.rope, scaling=scaling), sinks=True)
    layers = mixture_layers(
        keys, attention,
        lambda index: experts_of(
            keys, index, activation=Activation.CLAMPED_SWIGLU, scores=RouterScores.SOFTMAX_OF_CHOSEN,
            normalise=False,
        ),
        norm_name="post_attention_norm",
    )  # fmt: skip
    windowed = zip(layers, keys.windowed_layers(2), strict=True)
    window = keys.window()
    return dense_model(
        keys, *(attending(layer, window=window) if local else layer for layer, local in windowed)
    )
