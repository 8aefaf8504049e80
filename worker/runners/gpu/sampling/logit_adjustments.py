"""Biases and banned runs of tokens, as `cuda/sampling/adjust.cu` reads them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nightmill.jobs.request.parameters import MAX_BANNED_TOKENS, MAX_BIASES
from nightmill.worker.runners.base import Admission

__all__ = ["ADJUSTMENT_WORDS", "write_adjustments"]

ADJUSTMENT_WORDS = -(-(2 * MAX_BIASES + 2 * MAX_BANNED_TOKENS + 1) // 32) * 32
"""Room for the adjustments of a sequence, in words of 4 bytes: a run has a token, and where it begins."""


def write_adjustments(room: npt.NDArray[np.int32], admission: Admission) -> int:
    """Write to (ADJUSTMENT_WORDS,) the biases and banned runs of a sequence; returns the number of words."""
    biases: dict[int, float] = admission.params.logit_bias
    banned: Sequence[tuple[int, ...]] = admission.banned
    count, runs = len(biases), 2 * len(biases)
    tokens = runs + len(banned) + 1
    end = tokens + sum(map(len, banned))
    if count > MAX_BIASES or end - tokens > MAX_BANNED_TOKENS:
        raise ValueError(f"{count} biases and {end - tokens} banned tokens are more than there is room for")
    room[:count] = np.fromiter(biases, np.int32, count)
    room[count:runs].view(np.float32)[:] = np.fromiter(biases.values(), np.float32, count)
    room[runs] = 0
    room[runs + 1 : tokens] = np.cumsum([len(run) for run in banned], dtype=np.int32)
    room[tokens:end] = [token for run in banned for token in run]
    return end
