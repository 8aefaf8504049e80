"""OLMoE."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["olmoe"]


def olmoe(keys: Keys) -> ModelSpec:
    """Norms go over all heads of queries and keys; weights of experts are the softmax's, as they are."""
    attention = replace(keys.attention(RopeStyle.HALVES, qk_norm=keys.norm()), qk_norm_whole=True)
    layers = mixture_layers(keys, attention, lambda index: experts_of(keys, index, normalise=False))
    return dense_model(keys, *layers)
