"""ERNIE 4.5, with and without experts."""

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.experts import experts_of, leading_dense
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["ernie4_5", "ernie4_5_moe"]


def ernie4_5(keys: Keys) -> ModelSpec:
    """Llama's layers; pairs are neighbours in its own weights."""
    return dense_model(keys, dense_layer(keys, style=RopeStyle.PAIRS))


def ernie4_5_moe(keys: Keys) -> ModelSpec:
    """The first layers have no experts; of the others each `interleave_moe_layer_step`-th has."""
    first = leading_dense(keys)
    step = keys.file.integer(keys.name("interleave_moe_layer_step"), minimum=1, maximum=4096, default=1)
    layers = mixture_layers(
        keys, keys.attention(RopeStyle.PAIRS), lambda index: experts_of(keys, index),
        dense=lambda index: index < first or (index + 1) % step != 0,
    )  # fmt: skip
    return dense_model(keys, *layers)
