"""GLM-4 (0414), and GLM-4.5 to 4.7 with experts."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.experts import experts_of, leading_dense
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.families.predictors import predictor_of
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec, RouterScores

__all__ = ["glm4", "glm4moe"]


def glm4(keys: Keys) -> ModelSpec:
    """Norms after too; gate and up are one tensor, and half of a head is rotated."""
    norm = keys.norm()
    layer = dense_layer(keys, style=RopeStyle.PAIRS, fused=True)
    layer = replace(layer, attention_post_norm=norm, feed_forward_post_norm=norm)
    return replace(dense_model(keys, layer), overflows_half=True)


def glm4moe(keys: Keys) -> ModelSpec:
    """The first layers have no experts; the blocks behind the last, like that, predict further tokens."""
    keys.skip_predictors()
    norm, first = keys.norm(), leading_dense(keys)
    normed = keys.has_tensor("blk.0.attn_q_norm.weight")
    layers = mixture_layers(
        keys, keys.attention(RopeStyle.HALVES, qk_norm=norm if normed else None),
        lambda index: experts_of(keys, index, scores=RouterScores.SIGMOID),
        dense=lambda index: index < first, norm_name="post_attention_norm",
    )  # fmt: skip
    model = dense_model(keys, *layers)
    return replace(model, predictor=predictor_of(keys, model, layers[-1], hands_on_normed=False))
