"""Times as people write them on a command line."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.fields import moment
from nightmill.jobs.when import describe_moment, parse_moment, parse_span

EVENING = datetime(2026, 3, 28, 21, 0, tzinfo=UTC)  # 22:00 in Berlin, where clocks go forward that night


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine stands in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("23:00", datetime(2026, 3, 28, 22, 0, tzinfo=UTC)),
        ("22:00", datetime(2026, 3, 29, 20, 0, tzinfo=UTC)),  # now is not the next one
        ("01:00", datetime(2026, 3, 29, 0, 0, tzinfo=UTC)),
        ("1:00", datetime(2026, 3, 29, 0, 0, tzinfo=UTC)),
        ("06:00", datetime(2026, 3, 29, 4, 0, tzinfo=UTC)),  # by then an hour has been left out
        ("06:00:30", datetime(2026, 3, 29, 4, 0, 30, tzinfo=UTC)),
        ("8h", datetime(2026, 3, 29, 5, 0, tzinfo=UTC)),
        ("+90m", datetime(2026, 3, 28, 22, 30, tzinfo=UTC)),
        ("1.5d", datetime(2026, 3, 30, 9, 0, tzinfo=UTC)),
        ("2026-03-30T06:00", datetime(2026, 3, 30, 4, 0, tzinfo=UTC)),
        ("2026-03-30 06:00", datetime(2026, 3, 30, 4, 0, tzinfo=UTC)),
        ("2026-03-30T06:00Z", datetime(2026, 3, 30, 6, 0, tzinfo=UTC)),
        ("2026-03-30T06:00-05:00", datetime(2026, 3, 30, 11, 0, tzinfo=UTC)),
    ],
)
def test_a_time_is_the_next_one_and_has_a_zone(text: str, wanted: datetime) -> None:
    found = parse_moment("deadline", text, EVENING)
    assert found == wanted
    assert found.tzinfo is not None


@pytest.mark.parametrize(
    "text", ["", "six", "25:00", "6", "06", "2026-03-30", "20260330", "-8h", "8", "9e9d", "99999999d"]
)
def test_what_is_not_a_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"^deadline: .* is not a time; write 06:00"):
        parse_moment("deadline", text, EVENING)


@pytest.mark.parametrize(
    "text",
    [
        *("9999-12-31T23:59:58-12:00", "9999-12-31T23:59:58Z", "9999-12-31T23:59", "9999-06-01T00:00Z"),
        *("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z", "0001-01-01T00:00", "2912000d"),
    ],
)
def test_the_ends_of_the_calendar_are_refused_by_name(text: str) -> None:
    """Such a time could not be shown in every zone, nor a deadline be counted from it."""
    with pytest.raises(InvalidParameterError, match=r"^scheduled_at: "):
        parse_moment("scheduled_at", text, EVENING)
    with pytest.raises(InvalidParameterError, match=r"^scheduled_at: .* beyond the calendar"):
        moment("scheduled_at", datetime.max.replace(tzinfo=UTC), EVENING)
    with pytest.raises(InvalidParameterError, match=r"^scheduled_at: .* beyond the calendar"):
        moment("scheduled_at", datetime.min, EVENING)


def test_a_span_is_a_number_with_a_unit() -> None:
    spans = {text: parse_span("age", text) for text in ("90s", "30m", "1.5h", " 30d ", "8w")}
    assert spans == {
        "90s": timedelta(seconds=90),
        "30m": timedelta(minutes=30),
        "1.5h": timedelta(minutes=90),
        " 30d ": timedelta(days=30),
        "8w": timedelta(weeks=8),
    }
    for text in ("", "30", "d", "-3d", "06:00", "999999999999d"):
        with pytest.raises(
            InvalidParameterError, match=r"^age: .* is not a duration; write a number and s, m, h, d or w"
        ):
            parse_span("age", text)


def test_a_moment_is_shown_with_its_zone() -> None:
    assert describe_moment(EVENING) == "2026-03-28 22:00:00 CET"
