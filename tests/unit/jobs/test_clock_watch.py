"""When silence may be judged: not right after somebody set the clock by which it is measured."""

from datetime import UTC, datetime, timedelta

import pytest

from nightmill.jobs.sql.sweep import ClockWatch

START = datetime(2026, 1, 1, tzinfo=UTC)
STALE = timedelta(seconds=30)


def rounds(*times: tuple[float, float]) -> list[bool]:
    """Whether each round may judge; rounds are (seconds by the clock, seconds of this process)."""
    watch = ClockWatch()
    return [watch.trusted(START + timedelta(seconds=wall), count, STALE) for wall, count in times]


def test_a_clock_that_goes_as_usual_is_trusted_from_the_first_round() -> None:
    assert rounds((0, 0), (5, 5), (10.5, 10), (3600, 3600)) == [True] * 4


@pytest.mark.parametrize("step", [3600, 16, -16, -3600])
def test_after_a_step_nobody_is_judged_until_all_had_the_time_for_a_heartbeat(step: float) -> None:
    times = [(0, 0), (step + 5, 5), (step + 34.9, 34.9), (step + 35, 35), (step + 40, 40)]
    assert rounds(*times) == [True, False, False, True, True]


def test_a_step_too_small_to_make_anybody_look_silent_changes_nothing() -> None:
    assert rounds((0, 0), (5 + 14, 5), (24, 10)) == [True] * 3
