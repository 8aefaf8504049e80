"""Draws the next token of each row; the definition that every runner has to reproduce.

For one row of logits l over the vocabulary, in this order:

   mask         a token that the row's mask does not allow has l = -inf, as has one that is banned
0. numbers      NaN or +inf anywhere, or -inf everywhere: NOT_A_NUMBER, and nothing below applies. -inf
                beside finite logits is a token that is never drawn. Finite logits are taken as within -1e30
                and 1e30: then nothing below overflows, whatever the parameters are
1. penalties    biases are added; a token seen in prompt or answer: l / r where l > 0, else l * r (Keskar
                et al. 2019, CTRL); then what its count in the answer takes off. `adjusting` defines bans,
                biases and counts; a row that has any of these is taken as within the bounds once more
2. greedy       temperature 0: the largest l, the lowest id of equals; nothing below applies
3. temperature  l = (l - max l) / T
4. top-k        keep l >= the k-th largest l
5. top-p        q = softmax of what is left; keep a token if the q of all strictly likelier ones sum to < p
6. min-p        keep l >= max l + ln(min_p), which is q >= min_p * max q
7. draw         the largest l + g, g = -ln(-ln(1 - v)), v the uniform of (seed, position, token id)

Every filter keeps l >= a threshold: equals stand or fall together, and a GPU finds the threshold by search,
without a sort. k = 0, p = 1 and min_p = 0 switch a filter off. The most likely token always survives, also
where p is 0 in float32. Parameters are taken as float32; a temperature that is 0 there is greedy.

The draw is Gumbel-max: it picks token i with probability q_i (renormalised over the survivors), whatever was
filtered, needs neither a normalised distribution nor an order, and is one pass with a running maximum that
fuses with the LM head. One uniform through the inverse CDF would be cheaper here, but sums the vocabulary
twice, and its choice hangs on the rounding of a running sum. v < 2**-24 keeps precision where it counts: g is
large where v is near 0 (on a GPU: -logf(-log1pf(-v)) with v as in `philox.uniform`). As g <= 22.88, a token
whose l is more than that below the best l + g cannot win: both runners may skip its random number.

Log-probabilities are those of step 2: log softmax of l as masks, bans, biases and penalties leave it, before
temperature and filters. So what a mask or a ban does not allow has none, those that are allowed share all of
the probability, and the likeliest token is the one that a greedy draw takes. Where a token is given, as those
of a prompt are, nothing is drawn, and they are log softmax of the logits alone.

Row r depends on its logits, mask, parameters, seed and position, and on nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.adjusting import Adjustment, ban, bias, count_out
from nightmill.worker.runners.base import (
    FOUND,
    NOT_A_NUMBER,
    Admission,
    DrawArray,
    FoundArray,
    masked_draws,
)
from nightmill.worker.runners.philox import token_words, uniform

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_LARGEST_LOGIT = np.float32(1e30)  # times 100, for the penalty, and by 0.01: still far from infinity
_LARGEST_NOISE = np.float32(22.88)  # -ln(-ln(1 - 2**-33)) = 22.874, rounded up


PARAMETERS = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ]
)
"""All that a sequence's draws depend on beside logits and tokens: its seed, `GenerationParams` by name."""

ParameterArray = npt.NDArray[np.void]


def parameters_of(admission: Admission) -> tuple[Any, ...]:
    """The parameters of an admitted sequence, as a row of PARAMETERS."""
    _, *names = PARAMETERS.names or ()
    return (admission.seed, *(getattr(admission.params, name) for name in names))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the draws of R rows.

    parameters  (R,) PARAMETERS
    positions   (R,) int64, of the tokens that are drawn
    seen        one bool mask (V,) a row: the tokens of prompt and answer; None where the row has no penalty
    adjusted    the rows that are adjusted, by number
    """

    parameters: ParameterArray
    positions: npt.NDArray[np.int64]
    seen: list[npt.NDArray[np.bool_] | None]
    adjusted: Mapping[int, Adjustment] = field(default_factory=dict)

    def of(self, which: npt.NDArray[np.intp]) -> "SamplingRows":
        """Select these rows."""
        return SamplingRows(
            self.parameters[which],
            self.positions[which],
            [self.seen[row] for row in which],
            {place: self.adjusted[row] for place, row in enumerate(which.tolist()) if row in self.adjusted},
        )


def apply_masks(logits: FloatArray, draws: DrawArray, masks: IntArray) -> FloatArray:
    """Logits (R, V) with -inf for what the masks (M, words) do not allow; see `Runner.draw`."""
    which = masked_draws(draws)
    bits = np.unpackbits(masks[draws["mask"][which]].view(np.uint8), axis=1, bitorder="little")
    result = logits.copy()
    result[which] = np.where(bits[:, : logits.shape[1]], logits[which], np.float32(-np.inf))
    return result


def sample(logits: FloatArray, rows: SamplingRows) -> IntArray:
    """Draw one token id a row from logits (R, V), or NOT_A_NUMBER."""
    logits = _banned(logits, rows)
    largest = logits.max(axis=1)  # with NaN it is NaN
    numbers = np.isfinite(largest)
    if not numbers.all():
        tokens = np.full(len(logits), NOT_A_NUMBER, dtype=np.int32)
        if (which := np.flatnonzero(numbers)).size:
            tokens[which] = sample(logits[which], rows.of(which))
        return tokens
    if not logits.size or max(largest.max(), -logits.min()) <= _LARGEST_LOGIT:
        return _draw(logits, rows)
    return _draw(_bounded(logits), rows)


def _banned(logits: FloatArray, rows: SamplingRows) -> FloatArray:
    """Set tokens that would complete a banned run to -inf; returns `logits` itself if no row has any."""
    if any(by.words for by in rows.adjusted.values()):
        logits = logits.copy()
        for row, by in rows.adjusted.items():
            ban(logits[row], by)
    return logits


def log_probabilities(
    logits: FloatArray, rows: SamplingRows, tokens: IntArray, likely: IntArray
) -> FoundArray:
    """Compute FOUND (R,): log-probabilities of these tokens and the `likely` likeliest, of masked logits.

    A row whose token is NOT_A_NUMBER has NaN, and no likely tokens. Sums are made in float64.
    """
    found = np.zeros(len(logits), dtype=FOUND)
    found["logprob"], found["tokens"] = np.nan, -1
    which = np.flatnonzero(tokens != NOT_A_NUMBER)
    if not which.size:
        return found
    rows = rows.of(which)
    finite = penalise(_bounded(_banned(logits[which], rows)), rows).astype(np.float64)
    finite -= finite.max(axis=1, keepdims=True)
    finite -= np.log(np.exp(finite).sum(axis=1, keepdims=True))
    for values, row in zip(finite, which.tolist(), strict=True):
        found["logprob"][row] = values[tokens[row]]
        best = np.lexsort((np.arange(len(values)), -values))[: likely[row]]
        best = best[values[best] > -np.inf]
        found["tokens"][row, : len(best)] = best
        found["logprobs"][row, : len(best)] = values[best]
    return found


def _bounded(logits: FloatArray) -> FloatArray:
    return np.where(logits == -np.inf, logits, np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT))


def _draw(logits: FloatArray, rows: SamplingRows) -> IntArray:
    penalised = penalise(logits, rows)
    tokens: IntArray = penalised.argmax(axis=1).astype(np.int32)
    parameters = rows.parameters
    warm = np.flatnonzero(parameters["temperature"] > 0)
    if warm.size:
        scaled = penalised[warm]
        scaled -= scaled.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            scaled /= parameters["temperature"][warm, None]
        filter_rows(scaled, *(parameters[name][warm] for name in ("top_k", "top_p", "min_p")))
        tokens[warm] = _gumbel_argmax(scaled, parameters["seed"][warm], rows.positions[warm])
    return tokens


def penalise(logits: FloatArray, rows: SamplingRows) -> FloatArray:
    """Apply biases and penalties to bounded logits; returns `logits` itself where no row has any."""
    if all(seen is None for seen in rows.seen) and not rows.adjusted:
        return logits
    result = logits.copy()
    for row, by in rows.adjusted.items():
        bias(result[row], by)
    for row, seen in enumerate(rows.seen):
        if seen is not None:
            values = result[row, seen]
            penalty = rows.parameters["repetition_penalty"][row]
            result[row, seen] = np.where(values > 0, values / penalty, values * penalty)
    for row, by in rows.adjusted.items():
        count_out(result[row], by)
        result[row] = _bounded(result[row])
    return result


def filter_rows(scaled: FloatArray, top_k: IntArray, top_p: FloatArray, min_p: FloatArray) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p remove from (R, V) logits whose maximum is 0."""
    vocab = scaled.shape[1]
    keep_k = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    threshold = np.full(len(scaled), -np.inf, dtype=np.float32)
    sorting = np.flatnonzero((keep_k < vocab) | (top_p < 1))
    if sorting.size:
        ranked = np.sort(scaled[sorting], axis=1)[:, ::-1]
        kth = ranked[np.arange(sorting.size), keep_k[sorting] - 1]
        threshold[sorting] = np.maximum(kth, _top_p_threshold(ranked, kth, top_p[sorting]))
    with np.errstate(divide="ignore"):  # ln 0 = -inf: off
        threshold = np.maximum(threshold, np.log(min_p))
    if np.isfinite(threshold).any():
        scaled[scaled < threshold[:, None]] = -np.inf


def _top_p_threshold(ranked: FloatArray, kth: FloatArray, top_p: FloatArray) -> FloatArray:
    """The smallest logit that top-p keeps, of logits in descending order whose top-k threshold is `kth`."""
    mass = np.exp(ranked, dtype=np.float64)
    mass[ranked < kth[:, None]] = 0.0
    before = np.cumsum(mass, axis=1) - mass
    # Of equals the first in order has the least before it, so it decides for all of them.
    kept = before < top_p[:, None].astype(np.float64) * mass.sum(axis=1, keepdims=True)
    kept[:, 0] = True  # also where top_p is 0 in float32
    last = kept.shape[1] - 1 - kept[:, ::-1].argmax(axis=1)
    threshold: FloatArray = np.where(top_p < 1, ranked[np.arange(len(ranked)), last], np.float32(-np.inf))
    return threshold


def _gumbel_argmax(
    scaled: FloatArray, seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """Argmax of logits plus noise, in blocks of four tokens, which share one Philox counter."""
    count, vocab = scaled.shape
    blocks = -(-vocab // 4)
    noisy = np.full((count, blocks * 4), -np.inf, dtype=np.float32)
    noisy[:, :vocab] = scaled
    noisy = noisy.reshape(count, blocks, 4)
    best_in_block = np.maximum.reduce([noisy[:, :, lane] for lane in range(4)])
    row, block = np.nonzero(best_in_block > -_LARGEST_NOISE - 3)  # the best, at 0, gets no less than -3
    words = token_words(seeds[row], positions[row].astype(np.uint32), block.astype(np.uint32))
    scores = noisy[row, block] + gumbel(uniform(words))
    noisy.fill(-np.inf)
    noisy[row, block] = scores
    best: npt.NDArray[np.intp] = noisy.reshape(count, blocks * 4).argmax(axis=1)
    return best


def gumbel(v: FloatArray) -> FloatArray:
    """Standard Gumbel noise -ln(-ln(1 - v)) of uniforms v."""
    # 1 - v needs more than float32 where v is small; the outer logarithm does not.
    exponential = (-np.log(1.0 - v.astype(np.float64))).astype(np.float32)
    return -np.log(exponential)
