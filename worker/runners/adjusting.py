"""Changes to a row's logits by its parameters and its answer so far, the definition: bans, biases, penalties.

    banned     l = -inf for a token with which the answer would hold a banned run of tokens
    bias       l + b for a token that has a bias
    repetition `sampling.penalise`, which comes between
    counts     l - frequency_penalty * n - presence_penalty for a token that the answer holds n > 0 times

The order is vLLM's, so the same numbers mean the same there. A product and two differences in float32, each
rounded once. Counts are of the answer alone, as OpenAI has it; the repetition penalty sees the prompt, too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import Admission

FloatArray = npt.NDArray[np.float32]

__all__ = ["Adjustment", "adjusts", "adjustment_of", "ban", "bias", "count_out"]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to one row's logits.

    biases              (N,) of the tokens `biased` (N,), which differ
    words               runs of tokens that the answer must not hold
    answer              the tokens of the answer so far
    presence, frequency the penalties of its parameters
    """

    biased: npt.NDArray[np.int64]
    biases: FloatArray
    words: tuple[tuple[int, ...], ...]
    answer: list[int]
    presence: float
    frequency: float


def adjusts(admission: Admission) -> bool:
    """Return whether a sequence with these parameters has adjusted logits at all."""
    params = admission.params
    return bool(params.logit_bias or admission.banned or params.presence_penalty or params.frequency_penalty)


def adjustment_of(admission: Admission) -> Adjustment | None:
    """Make the adjustment of an admitted sequence, or None; its keeper adds what is drawn to `answer`."""
    if not adjusts(admission):
        return None
    params = admission.params
    return Adjustment(
        biased=np.fromiter(params.logit_bias, np.int64, len(params.logit_bias)),
        biases=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
        words=admission.banned,
        answer=list(admission.token_ids[len(admission.token_ids) - admission.answered :]),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def ban(row: FloatArray, by: Adjustment) -> None:
    """Set the logits (V,) of tokens that would complete a banned run to -inf."""
    for *before, last in by.words:
        if not before or by.answer[-len(before) :] == before:
            row[last] = -np.inf


def bias(row: FloatArray, by: Adjustment) -> None:
    """Add the biases to logits (V,)."""
    row[by.biased] += by.biases


def count_out(row: FloatArray, by: Adjustment) -> None:
    """Take presence and frequency penalties off logits (V,)."""
    tokens, times = np.unique(np.asarray(by.answer, dtype=np.int64), return_counts=True)
    frequency, presence = np.float32(by.frequency), np.float32(by.presence)
    row[tokens] = row[tokens] - frequency * times.astype(np.float32) - presence
