"""From what a file asks for and what a sample cost to the time that the whole of it takes.

The night is played through: answers in the order of the file take the first slot that comes free, for as many
rounds as they have tokens, drawn from the measured survival curve. So the batch fills, runs full, and
drains at the end, when ever fewer long answers are left and a round costs nearly as much as before.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.commands.planning.measure import FloatArray, Measurement
from nightmill.worker.commands.planning.survey import Survey

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the KV cache that answers need, each for its prompt and itself; none counted as shared."""

    running: int
    """For those that run at once, if they have the expected length."""
    running_at_most: int
    """For as many of the largest, each as long as it may be."""
    whole: int
    """For all, were they to run at once."""


@dataclass(frozen=True, slots=True)
class Playthrough:
    """The expected time, tokens and speed of the whole file."""

    seconds: float
    tail_seconds: float
    """The part of `seconds` after the first slot stays empty: the batch drains."""
    output_tokens: int
    rounds: int
    slots: int
    """Answers that are generated at once, over all workers."""
    tokens_per_second: float


def expected_lengths(survey: Survey, survival: FloatArray | None) -> FloatArray:
    """(answers,): tokens that each answer will have on average; its limit if nothing is known."""
    limits = _of_each(survey, survey.limits)
    if survival is None or not limits.size:
        return limits.astype(np.float64)
    curve = _lengthened(survival, int(limits.max()))
    means = np.concatenate([[0.0], np.cumsum(curve)])  # E[min(length, m)] = sum of survival[t], t < m
    return np.where(_of_each(survey, survey.endless), limits, means[limits])


def pages_needed(survey: Survey, lengths: FloatArray, slots: int, page_size: int) -> Pages:
    """Pages for `slots` answers at once, and for all."""
    prompts = prompts_of_answers(survey)
    expected = np.ceil((prompts + lengths) / page_size)
    most = np.sort(-(-(prompts + _of_each(survey, survey.limits)) // page_size))
    running = min(slots, len(prompts))
    return Pages(
        running=round(float(expected.mean()) * running) if running else 0,
        running_at_most=int(most[len(most) - running :].sum()),
        whole=int(expected.sum()),
    )


def play_through(survey: Survey, measured: Measurement, *, slots: int, workers: int = 1) -> Playthrough:
    """Play the night through on `workers` workers of this speed with `slots` slots each."""
    lengths = draw_lengths(survey, measured.survival)
    rounds, full_rounds, tail_tokens = play(lengths, slots * workers)
    tokens = int(lengths.sum())
    speed = measured.speed
    prompts = sum(survey.prompt_tokens) * measured.computed_share
    seconds = (
        speed.per_round * rounds + (speed.per_prompt_token * prompts + speed.per_token * tokens) / workers
    )
    return Playthrough(
        seconds=seconds,
        tail_seconds=speed.per_round * (rounds - full_rounds) + speed.per_token * tail_tokens / workers,
        output_tokens=tokens,
        rounds=rounds,
        slots=slots * workers,
        tokens_per_second=tokens / seconds if seconds else 0.0,
    )


def draw_lengths(survey: Survey, survival: FloatArray) -> IntArray:
    """(answers,): a length for each, drawn from the curve and cut at the row's limit."""
    limits = _of_each(survey, survey.limits)
    if not limits.size:
        return limits
    chance = np.random.default_rng(0).random(limits.size)
    drawn = np.searchsorted(1 - survival, chance, side="right")
    beyond = drawn >= len(survival)  # longer than anything that was seen
    return np.where(beyond | (_of_each(survey, survey.endless) > 0), limits, np.minimum(drawn, limits))


def prompts_of_answers(survey: Survey) -> IntArray:
    """(answers,): the tokens of the prompt of each."""
    return _of_each(survey, survey.prompt_tokens)


def play(lengths: IntArray, slots: int) -> tuple[int, int, int]:
    """Rounds in all, rounds with all slots taken, and the tokens drawn after those."""
    ends = [0] * min(slots, len(lengths))
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    if not ends:
        return 0, 0, 0
    full = min(ends)
    return max(ends), full, sum(ends) - full * len(ends)


def _of_each(survey: Survey, rows: Sequence[int]) -> IntArray:
    """(answers,): of each answer what `rows` says of its row."""
    return np.repeat(np.array(rows, dtype=np.int64), np.array(survey.answers, dtype=np.int64))


def _lengthened(curve: FloatArray, size: int) -> FloatArray:
    return np.concatenate([curve, np.full(max(0, size - len(curve)), curve[-1])])
