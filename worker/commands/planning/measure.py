"""Runs a sample of a file's rows on the engine that a worker would use, and draws from it what a row costs.

Two things come out. The *speed*: what the engine's seconds went into, as three prices found by least squares
over the whole run, while the batch filled, was full, and drained:

    seconds = per_round * rounds + per_prompt_token * prompt tokens + per_token * tokens drawn

where a round draws one token for each running sequence. And the *lengths* of the answers, as a survival
curve (Kaplan and Meier, 1958): rows that ran into their limit, or had not ended when the time was up, say
only that their answers would have been longer, and are counted as that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.engine.stats import EngineStats

WARM_UP = 8
"""Rows that are run first and not measured: the first steps pay for what later ones find ready."""
_WARM_UP_TOKENS = 4
_LEAST_METERED = 1.0  # seconds, of which the counter of energy tells enough
_WINDOW = 8  # steps whose time is looked at as one: a runner may work ahead, and a clock jitters
_BY_ITSELF = (StopReason.EOS, StopReason.STOP_SEQUENCE)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that the engine takes for each of these."""

    per_round: float
    per_prompt_token: float
    per_token: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The speed and the lengths of answers that a sample showed."""

    speed: Speed
    survival: FloatArray
    """`survival[t]`: the share of answers with more than t tokens, if nothing but their end ended them."""
    rows: int
    seconds: float
    computed_share: float
    """Prompt tokens computed, per token of the prompts: under 1 where prefixes are shared, over 1 where
    sequences were preempted."""
    watts: float | None = None
    """Power of the device while it computed; None if it does not tell, or was measured too shortly."""


def measure(
    engine: Engine,
    sample: Sequence[Request],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement | None:
    """Run `sample` to its end, or for `seconds`. None if it holds too few rows to say anything.

    The engine has to be idle, and is idle afterwards. Raises RunnerError as the engine does.
    """
    warm_up, rows = sample[:WARM_UP], sample[WARM_UP:]
    if not rows:
        return None
    _warm_up(engine, warm_up)
    before = engine.stats
    for request in rows:
        engine.submit(request)
    windows: list[tuple[float, float, int, int]] = []
    done: list[Completion] = []
    began = now = clock()
    while engine.has_work and now - began < seconds:
        start, rounds, stats = now, 0.0, engine.stats
        for _ in range(_WINDOW):
            drawn, running = engine.stats.generated_tokens, engine.running
            done += engine.step()
            rounds += (engine.stats.generated_tokens - drawn) / max(running, engine.running, 1)
        now, after = clock(), engine.stats
        prompt = after.prompt_tokens - stats.prompt_tokens
        windows.append((now - start, rounds, prompt, after.generated_tokens - stats.generated_tokens))
    lengths, by_itself = _lengths(engine, rows, done)
    prompts = sum(len(request.prompt_ids) for request in rows if request.job_id in lengths)
    after = engine.stats
    computed = after.prompt_tokens - before.prompt_tokens
    engine.abandon()
    return Measurement(
        speed=fit(windows),
        survival=survival_curve(
            [lengths[r.job_id] for r in rows if r.job_id in lengths and not _endless(r)],
            [r.job_id in by_itself for r in rows if r.job_id in lengths and not _endless(r)],
        ),
        rows=len(rows),
        seconds=now - began,
        computed_share=computed / max(prompts, 1),
        watts=_watts(before, after),
    )


def _watts(before: EngineStats, after: EngineStats) -> float | None:
    seconds = after.gpu_seconds - before.gpu_seconds
    if after.energy_joules is None or seconds < _LEAST_METERED:
        return None
    return (after.energy_joules - (before.energy_joules or 0.0)) / seconds


def _warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        params = request.params.model_copy(
            update={"max_tokens": min(request.params.max_tokens, _WARM_UP_TOKENS)}
        )
        engine.submit(replace(request, attempt=0, params=params))
    while engine.has_work:
        engine.step()


def _endless(request: Request) -> bool:
    params = request.params
    return params.ignore_eos and not (params.stop or params.stop_token_ids)


def _lengths(
    engine: Engine, rows: Sequence[Request], done: Sequence[Completion]
) -> tuple[dict[str, int], set[str]]:
    """Tokens drawn for each row that was begun, and the rows whose answers ended by themselves."""
    lengths = {completion.job_id: completion.completion_tokens for completion in done}
    for request in rows:
        partial = engine.partial(request.job_id)
        if partial is not None and partial.token_ids:
            lengths[request.job_id] = len(partial.token_ids)
    return lengths, {completion.job_id for completion in done if completion.stop_reason in _BY_ITSELF}


def fit(windows: Sequence[tuple[float, float, int, int]]) -> Speed:
    """The prices, none negative, that explain (seconds, rounds, prompt tokens, tokens drawn) best."""
    table = np.array(windows, dtype=np.float64)
    seconds, work = table[:, 0], table[:, 1:]
    best, least = np.zeros(3), float(seconds @ seconds)
    # Of the solutions that leave some prices at zero, the best without a negative one is the optimum.
    for count in (1, 2, 3):
        for columns in map(list, combinations(range(3), count)):
            prices = np.linalg.lstsq(work[:, columns], seconds, rcond=None)[0]
            rest = seconds - work[:, columns] @ prices
            if (prices >= 0).all() and rest @ rest < least:
                best, least = np.zeros(3), float(rest @ rest)
                best[columns] = prices
    # Least squares follow the large windows; what the whole run took is to come out as it was.
    scale = seconds.sum() / max(float((work @ best).sum()), 1e-12)
    return Speed(*(float(price) for price in best * scale))


def survival_curve(lengths: Sequence[int], by_itself: Sequence[bool]) -> FloatArray:
    """`curve[t]`: the share of answers with more than t tokens; from its end on it stays as it is there.

    `lengths[i]` tokens were drawn for row i; `by_itself[i]`: its answer ended there, else it went on.
    """
    curve = np.ones(max(lengths, default=0) + 1)
    drawn, ended = np.array(lengths, dtype=np.int64), np.array(by_itself, dtype=bool)
    for t in range(1, len(curve)):
        at_risk = int((drawn >= t).sum())
        curve[t] = curve[t - 1] * (1 - int((drawn[ended] == t).sum()) / at_risk)
    return curve
