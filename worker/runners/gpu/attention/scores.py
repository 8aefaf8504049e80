"""Arguments of attention kernels: head sizes, scaling, capping and windowing of scores."""

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.device.sources import Source, by_head, source_of

__all__ = ["FAST_HEADS", "PREFILL_HEADS", "SCORES", "score_arguments", "scoring"]

_LOG2_E = 1.4426950408889634
_FARTHEST = 2**31 - 1  # keys

PREFILL_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Sizes of heads that tensor cores compute on every GPU in prompts; `attention_any.cu` takes all others."""

FAST_HEADS = (64, 80, 96, 112, 128, 160, 192, 256)
"""The same for drawn tokens, and for prompts on Hopper."""

_OF_PROMPTS = ("prefill_attention", "attention_any")  # kernels of an encoder, which draws nothing

SCORES = "ffiP"
"""Letters of arguments (`Module.function`): `score_arguments`, and the address of a layer's sinks, or 0."""


def scoring(name: str, attention: Attention, value_dim: int | None = None) -> Source:
    """A kernel file, compiled for the heads of a layer, with what its scores need and no more.

    value_dim  attention is latent: so many elements of a key are its value
    """
    values = () if value_dim is None else (f"-DVALUE_DIM={value_dim}",)
    window, cap = attention.window is not None, attention.softcap is not None
    wanted = {
        "-DWINDOW": window, "-DSOFTCAP": cap, "-DSINKS": attention.sinks,
        "-DBIDIRECTIONAL": not attention.causal and name in _OF_PROMPTS,
    }  # fmt: skip
    return source_of(
        name, *by_head(attention), *values, *(option for option, is_needed in wanted.items() if is_needed)
    )


def score_arguments(attention: Attention) -> tuple[float, float, int]:
    """Scale, cap and window, as `Scores` in attention.cuh takes them: kernels compute powers of 2."""
    window = min(attention.window or _FARTHEST, _FARTHEST)
    if attention.window is not None and not attention.causal:
        window = 2 * (window // 2) + 1  # a half to each side
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    if attention.softcap is None:
        return scale * _LOG2_E, 0.0, window
    return 2 * scale / attention.softcap * _LOG2_E, attention.softcap * _LOG2_E, window
