"""From what a file asks for and what a sample cost to the time that the whole of it takes.

The night is played through: rows in the order of the file take the first slot that comes free, for as many
rounds as their answer has tokens, drawn from the measured survival curve. So the batch fills, runs full, and
drains at the end, when ever fewer long answers are left and a round costs nearly as much as before.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.commands.planning.measure import FloatArray, Measurement
from nightmill.worker.commands.planning.survey import Survey

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the KV cache that rows need, each for its prompt and its answer; none counted as shared."""

    running: int
    """For the rows that run at once, with answers of the expected length."""
    running_at_most: int
    """For as many of the largest rows, each with the longest answer that it may have."""
    whole: int
    """For all rows, were they to run at once."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of the whole file."""

    seconds: float
    tail_seconds: float
    """Of these, from the moment when the first slot stays empty: the batch drains."""
    output_tokens: int
    rounds: int
    slots: int
    """Rows that run at once, over all workers."""
    tokens_per_second: float


def expected_lengths(survey: Survey, survival: FloatArray | None) -> FloatArray:
    """(good rows,): tokens that each answer will have on average; its limit if nothing is known."""
    limits = np.array(survey.limits, dtype=np.int64)
    if survival is None or not limits.size:
        return limits.astype(np.float64)
    curve = _lengthened(survival, int(limits.max()))
    means = np.concatenate([[0.0], np.cumsum(curve)])  # E[min(length, m)] = sum of survival[t], t < m
    return np.where(np.array(survey.endless, dtype=bool), limits, means[limits])


def pages_needed(survey: Survey, lengths: FloatArray, slots: int, block_size: int) -> Pages:
    """Pages for `slots` rows at once, and for all."""
    prompts = np.array(survey.prompt_tokens, dtype=np.int64)
    expected = np.ceil((prompts + lengths) / block_size)
    most = np.sort(-(-(prompts + np.array(survey.limits, dtype=np.int64)) // block_size))
    running = min(slots, survey.good)
    return Pages(
        running=round(float(expected.mean()) * running) if running else 0,
        running_at_most=int(most[len(most) - running :].sum()),
        whole=int(expected.sum()),
    )


def forecast(survey: Survey, measured: Measurement, *, slots: int, workers: int = 1) -> Forecast:
    """Play the night through on `workers` workers of this speed with `slots` slots each."""
    lengths = draw_lengths(survey, measured.survival)
    rounds, full_rounds, tail_tokens = play(lengths, slots * workers)
    tokens = int(lengths.sum())
    speed = measured.speed
    prompts = sum(survey.prompt_tokens) * measured.computed_share
    seconds = (
        speed.per_round * rounds + (speed.per_prompt_token * prompts + speed.per_token * tokens) / workers
    )
    return Forecast(
        seconds=seconds,
        tail_seconds=speed.per_round * (rounds - full_rounds) + speed.per_token * tail_tokens / workers,
        output_tokens=tokens,
        rounds=rounds,
        slots=slots * workers,
        tokens_per_second=tokens / seconds if seconds else 0.0,
    )


def draw_lengths(survey: Survey, survival: FloatArray) -> IntArray:
    """(good rows,): a length for each answer, drawn from the curve and cut at the row's limit."""
    limits = np.array(survey.limits, dtype=np.int64)
    if not limits.size:
        return limits
    chance = np.random.default_rng(0).random(limits.size)
    drawn = np.searchsorted(1 - survival, chance, side="right")
    beyond = drawn >= len(survival)  # longer than anything that was seen
    return np.where(beyond | np.array(survey.endless, dtype=bool), limits, np.minimum(drawn, limits))


def play(lengths: IntArray, slots: int) -> tuple[int, int, int]:
    """Rounds in all, rounds with all slots taken, and the tokens drawn after those."""
    ends = [0] * min(slots, len(lengths))
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    if not ends:
        return 0, 0, 0
    full = min(ends)
    return max(ends), full, sum(ends) - full * len(ends)


def _lengthened(curve: FloatArray, size: int) -> FloatArray:
    return np.concatenate([curve, np.full(max(0, size - len(curve)), curve[-1])])
