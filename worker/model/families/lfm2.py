"""LFM2, with and without experts: most layers have a short convolution in place of attention."""

from collections.abc import Callable
from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of, leading_dense
from nightmill.worker.model.families.hybrid import attention_layers, kinds_by_heads
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec, RouterScores, ShortConv

__all__ = ["lfm2", "lfm2moe"]

_CONVOLUTION = "a short convolution"
_FURTHEST = 64


def lfm2(keys: Keys) -> ModelSpec:
    """Each head's query and key are normed; the last norm goes by another name."""
    keys.refuse_experts()
    return _model(keys, lambda _: True)


def lfm2moe(keys: Keys) -> ModelSpec:
    """The first layers have no experts."""
    first = leading_dense(keys)
    return _model(keys, lambda index: index < first)


def _model(keys: Keys, dense: Callable[[int], bool]) -> ModelSpec:
    kinds, norm = kinds_by_heads(keys, _CONVOLUTION, "shortconv.conv.weight"), keys.norm()
    attention = keys.attention(
        RopeStyle.HALVES, qk_norm=norm, layers=attention_layers(keys, kinds, "attention.head_count_kv")
    )
    kernel = keys.file.integer(keys.name("shortconv.l_cache"), minimum=1, maximum=_FURTHEST)
    convolution = ShortConv(width=keys.size("embedding_length"), kernel=kernel)
    layers = mixture_layers(
        keys, attention, lambda index: experts_of(keys, index, scores=RouterScores.SIGMOID), dense=dense
    )
    mixed = (
        replace(layer, mixer=convolution) if kind == _CONVOLUTION else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )
    return replace(dense_model(keys, *mixed), output_norm_name="token_embd_norm")
