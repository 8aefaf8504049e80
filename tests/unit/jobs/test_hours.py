"""Windows of the day: as a clock on the wall shows them, also when clocks change."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.hours import Hours, begin_within, end_within

BERLIN = ZoneInfo("Europe/Berlin")
MINUTE = timedelta(minutes=1)
SPANS = st.tuples(st.integers(0, 1439), st.integers(0, 1439)).filter(lambda span: span[0] != span[1])


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "is_open", "change"),
    [
        ("2026-11-27 20:59", False, "2026-11-27 21:00"),
        ("2026-11-27 21:00", True, "2026-11-28 05:00"),
        ("2026-11-28 04:59:59", True, "2026-11-28 05:00"),
        ("2026-11-28 05:00", False, "2026-11-28 21:00"),
        ("2026-03-28 21:00", True, "2026-03-29 04:00"),  # clocks go forward: seven hours
        ("2026-10-24 20:00", True, "2026-10-25 05:00"),  # and back: nine
    ],
)
def test_a_night_is_from_its_begin_to_its_end_on_the_wall(moment: str, is_open: bool, change: str) -> None:
    hours = Hours.parse("22:00-06:00/Europe/Berlin")
    assert hours.open_at(at(moment)) is is_open
    assert hours.next_change(at(moment)) == at(change)


def test_a_window_in_the_hour_that_is_left_out_does_not_open_and_comes_twice_where_the_hour_does() -> None:
    hours = Hours.parse("02:10-02:50/Europe/Berlin")
    assert hours.next_change(at("2026-03-28 12:00")) == at("2026-03-30 00:10")
    first = hours.next_change(at("2026-10-25 00:00"))
    assert first == at("2026-10-25 00:10")
    assert [hours.open_at(at(f"2026-10-25 0{hour}:20")) for hour in (0, 1, 2)] == [True, True, False]


@given(
    st.lists(SPANS, min_size=1, max_size=3),
    st.datetimes(datetime(2025, 1, 1), datetime(2027, 12, 31), timezones=st.just(UTC)),
)  # fmt: skip
def test_what_was_parsed_is_written_again_and_changes_are_the_first(
    spans: list[tuple[int, int]], moment: datetime
) -> None:
    hours = Hours(tuple(spans), "Europe/Berlin")
    assert Hours.parse(str(hours)) == hours
    change = hours.next_change(moment)
    before = hours.open_at(moment)
    if change is None:
        assert all(hours.open_at(moment + step * 7 * MINUTE) is before for step in range(400))
        return
    assert moment < change <= moment + timedelta(hours=26)
    assert hours.open_at(change) is not before and hours.open_at(change - MINUTE) is before
    assert change.astimezone(BERLIN).second == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be windows"),
        ("22-06", "must be windows"),
        ("24:00-06:00", "must be windows"),
        ("22:00-06:00/", "must be windows"),
        ("22:00-06:00,", "must be windows"),
        ("06:00-06:00", "is empty, or the whole day"),
        ("22:00-06:00/Mars/Base", "'Mars/Base' is not a time zone"),
        ("22:00-06:00/../../etc/passwd", "is not a time zone"),
    ],
)
def test_other_hours_are_refused_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Hours.parse(text)


def test_windows_that_cover_the_day_never_change() -> None:
    assert Hours.parse("00:00-12:00,12:00-00:00").next_change(at("2026-01-01 00:00")) is None


def test_work_goes_on_in_the_next_night() -> None:
    night, noon = Hours.parse("22:00-06:00/UTC"), Hours.parse("12:00-13:00/UTC")
    four = datetime(2026, 1, 2, 4, 0, tzinfo=UTC)
    hour = 3600.0
    assert end_within([], four, 9 * hour) == datetime(2026, 1, 2, 13, 0, tzinfo=UTC)
    assert end_within([night], four, 2 * hour) == datetime(2026, 1, 2, 6, 0, tzinfo=UTC)
    assert end_within([night], four, 3 * hour) == datetime(2026, 1, 2, 23, 0, tzinfo=UTC)
    assert end_within([night], four, 18.5 * hour) == datetime(2026, 1, 4, 22, 30, tzinfo=UTC)
    assert end_within([night, noon], four, 3 * hour) == datetime(2026, 1, 2, 13, 0, tzinfo=UTC)
    assert end_within([night], datetime(2026, 1, 2, 9, 0, tzinfo=UTC), hour).hour == 23
    assert begin_within([night], four) == four and begin_within([], four) == four
    day = datetime(2026, 1, 2, 9, 30, tzinfo=UTC)
    assert begin_within([night], day).hour == 22 and begin_within([night, noon], day).hour == 12
    # Clocks go forward in this night: it has seven hours.
    berlin = Hours.parse("22:00-06:00/Europe/Berlin")
    began = datetime(2026, 3, 28, 21, 0, tzinfo=UTC)
    assert end_within([berlin], began, 7 * hour) == datetime(2026, 3, 29, 4, 0, tzinfo=UTC)
    assert end_within([berlin], began, 7 * hour + 60) == datetime(2026, 3, 29, 20, 1, tzinfo=UTC)
