"""From a sample to the night: prices, lengths, filling and draining, against a runner of known speed."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.commands.planning.measure import Measurement, Speed, fit, measure, survival_curve
from nightmill.worker.commands.planning.playing import (
    draw_lengths,
    expected_lengths,
    pages_needed,
    play,
    play_through,
)
from nightmill.worker.engine.request import Request
from tests.support.thinning import thinned
from tests.unit.planning.night import PER_STEP, PER_TOKEN, SLOTS, surveyed, time_of, timed_engine

pytestmark = pytest.mark.heavy


def requests(count: int, *, seed: int = 1, endless: float = 0.2, most: int = 60) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            job_id=f"{seed}-{number}",
            attempt=1,
            prompt_ids=tuple(draw.randrange(12) for _ in range(draw.randrange(2, 40))),
            params=GenerationParams(max_tokens=draw.randrange(1, most), ignore_eos=draw.random() < endless),
            seed=draw.getrandbits(30),
        )
        for number in range(count)
    ]


def measured(sample: list[Request], seconds: float = 1e9) -> Measurement:
    runner, engine = timed_engine()
    result = measure(engine, sample, seconds=seconds, clock=runner.clock)
    assert result is not None
    assert not engine.has_work
    return result


@cache
def real_night(rows: int, workers: int = 1) -> list[tuple[float, int]]:
    """What each of the workers takes for `requests(rows)`: (seconds, tokens drawn)."""
    night = requests(rows)
    return [time_of(night[worker::workers]) for worker in range(workers)]


@pytest.mark.parametrize(("workers", "rows"), thinned([(3, 300), (1, 300), (1, 600), (3, 600)], 2))
def test_the_forecast_of_a_night_is_close_to_the_night(rows: int, workers: int) -> None:
    night = requests(rows)
    found = surveyed(night, sample=200)
    told = play_through(found, measured(found.sample), slots=SLOTS, workers=workers)
    real = real_night(rows, workers)
    seconds, tokens = max(taken for taken, _ in real), sum(drawn for _, drawn in real)
    assert told.seconds == pytest.approx(seconds, rel=0.1)
    assert told.output_tokens == pytest.approx(tokens, rel=0.1)
    assert told.tokens_per_second == pytest.approx(tokens / seconds, rel=0.1)


@pytest.mark.slow  # seldom changes
def test_prompt_tokens_that_rows_share_are_not_paid_for_again() -> None:
    prefix = tuple(random.Random(2).randrange(12) for _ in range(100))
    night = [replace(request, prompt_ids=prefix + request.prompt_ids) for request in requests(400)]
    found = surveyed(night, sample=150)
    sample = measured(found.sample)
    assert sample.computed_share < 0.4  # of 120 tokens, 100 are the same
    real, _ = time_of(night)
    assert play_through(found, sample, slots=SLOTS).seconds == pytest.approx(real, rel=0.1)


@pytest.mark.slow  # the other measurements of this file are made in full
def test_a_measurement_that_is_broken_off_tells_nearly_the_same() -> None:
    night = requests(600)
    found = surveyed(night, sample=250)
    whole = measured(found.sample)
    part = measured(found.sample, seconds=whole.seconds / 2)
    assert part.seconds < 0.6 * whole.seconds
    ((real, _),) = real_night(600)
    assert play_through(found, part, slots=SLOTS).seconds == pytest.approx(real, rel=0.2)


def test_the_tail_of_a_night_with_one_long_row_is_counted() -> None:
    short = requests(200, endless=1.0, most=4)
    last = Request("long", 1, (1, 2), GenerationParams(max_tokens=190, ignore_eos=True), 3)
    found = surveyed([*short, last], sample=150)
    told = play_through(found, measured(found.sample), slots=SLOTS)
    real, _ = time_of([*short, last])
    assert told.seconds == pytest.approx(real, rel=0.1)
    assert told.tail_seconds == pytest.approx(185 * (PER_STEP + PER_TOKEN), rel=0.1)


def test_a_sample_too_small_to_measure_gives_nothing() -> None:
    runner, engine = timed_engine()
    assert measure(engine, requests(8), seconds=9, clock=runner.clock) is None


def test_the_warm_up_is_not_part_of_the_measurement() -> None:
    sample = requests(60, endless=1.0)
    result = measured(sample)
    assert result.rows == 52
    assert result.seconds == pytest.approx(time_of(sample[8:])[0])
    assert result.computed_share == 1.0


def test_prices_are_found_from_windows_that_they_explain() -> None:
    draw = random.Random(1)
    windows = []
    for _ in range(40):
        rounds, prompt, tokens = draw.random() * 8, draw.randrange(400), draw.randrange(200)
        windows.append((0.01 * rounds + 0.001 * prompt + 0.002 * tokens, rounds, prompt, tokens))
    assert fit(windows) == Speed(*(pytest.approx(price) for price in (0.01, 0.001, 0.002)))


def test_no_price_is_negative_and_the_whole_time_is_explained() -> None:
    windows = [(1.0, 8.0, 0, 8), (1.0, 8.0, 0, 64), (0.5, 8.0, 100, 64)]
    speed = fit(windows)
    assert min(speed.per_round, speed.per_prompt_token, speed.per_token) >= 0
    told = sum(
        speed.per_round * r + speed.per_prompt_token * p + speed.per_token * t for _, r, p, t in windows
    )
    assert told == pytest.approx(2.5)


def test_answers_that_ran_into_their_limit_count_as_longer() -> None:
    # One of four ended at 2; one was cut at 2; of the two that are left, one ended at 3.
    curve = survival_curve([2, 2, 3, 3], [True, False, True, False])
    assert curve == pytest.approx([1.0, 1.0, 0.75, 0.375])


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=50))
def test_without_limits_the_curve_is_the_share_of_longer_answers(pairs: list[tuple[int, int]]) -> None:
    lengths = [length for length, _ in pairs]
    curve = survival_curve(lengths, [True] * len(lengths))
    assert curve == pytest.approx([sum(x > t for x in lengths) / len(lengths) for t in range(len(curve))])


def test_lengths_drawn_from_the_curve_have_the_mean_that_it_says() -> None:
    found = surveyed(requests(20_000, endless=0.1), sample=0)
    curve = survival_curve([3, 5, 5, 20, 25], [True, True, False, True, False])
    drawn, means = draw_lengths(found, curve), expected_lengths(found, curve)
    assert drawn.mean() == pytest.approx(means.mean(), rel=0.02)
    limits = np.array(found.limits)
    endless = np.array(found.endless, dtype=bool)
    assert (drawn <= limits).all() and (drawn[endless] == limits[endless]).all()
    assert (means[endless] == limits[endless]).all()


def test_where_nothing_is_known_answers_are_as_long_as_they_may_be() -> None:
    found = surveyed(requests(50), sample=0)
    assert expected_lengths(found, None).tolist() == list(found.limits)


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(1, 9))
def test_playing_a_night_through_is_what_slots_would_do(lengths: list[int], slots: int) -> None:
    """Against the same by single rounds: a free slot takes the next row, each running row draws one token."""
    waiting, running, history = list(lengths), list[int](), list[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        history.append(len(running))
        running = [left - 1 for left in running if left > 1]
    full = sum(count == min(slots, len(lengths)) for count in history)
    expected = (len(history), full, sum(lengths) - full * min(slots, len(lengths)))
    assert play(np.array(lengths, dtype=np.int64), slots) == expected


def test_pages_are_counted_row_by_row() -> None:
    night = [
        Request(str(n), 1, (1,) * prompt, GenerationParams(max_tokens=limit, ignore_eos=True), 1)
        for n, (prompt, limit) in enumerate([(3, 1), (4, 1), (10, 30), (1, 1)])
    ]
    found = surveyed(night, sample=0)
    pages = pages_needed(found, expected_lengths(found, None), 2, page_size=4)
    assert (pages.whole, pages.running_at_most) == (1 + 2 + 10 + 1, 10 + 2)
    assert pages.running == 7  # two rows of the mean of 3.5
    found.answers[1] = 3
    pages = pages_needed(found, lengths := expected_lengths(found, None), 3, page_size=4)
    assert (pages.whole, pages.running_at_most) == (1 + 3 * 2 + 10 + 1, 10 + 2 + 2)
    assert lengths.tolist() == [1, 1, 1, 1, 30, 1] == draw_lengths(found, np.ones(1)).tolist()
