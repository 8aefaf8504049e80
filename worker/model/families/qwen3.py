"""Qwen3, with and without experts."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.experts import experts_of
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["qwen3", "qwen3moe"]


def qwen3(keys: Keys) -> ModelSpec:
    """Each head's query and key are normed."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.HALVES, qk_norm=True))


def qwen3moe(keys: Keys) -> ModelSpec:
    """The same attention; all layers have experts."""
    attention = keys.attention(RopeStyle.HALVES, qk_norm=keys.norm())
    return dense_model(keys, *mixture_layers(keys, attention, lambda index: experts_of(keys, index)))
