"""Times as people write them on a command line."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.jobs.base.times import describe_moment, parse_moment, parse_span
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.fields import moment

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
    ("zone", "now", "text", "wanted"),
    [  # forward over it, then back over it; midnight itself is missing in Cairo and Santiago
        ("Europe/Berlin", "2027-03-27T20:00Z", "02:30", "2027-03-28T01:00Z"),
        ("Europe/Berlin", "2027-03-28T00:45Z", "02:30", "2027-03-28T01:00Z"),
        ("Europe/Berlin", "2027-03-28T01:00Z", "02:30", "2027-03-29T00:30Z"),
        ("Europe/Berlin", "2026-10-24T20:00Z", "02:30", "2026-10-25T00:30Z"),
        ("Europe/Berlin", "2026-10-25T01:10Z", "02:30", "2026-10-25T01:30Z"),
        ("Europe/Berlin", "2026-10-25T01:10Z", "2026-10-25T02:30", "2026-10-25T01:30Z"),
        ("Europe/Berlin", "2026-10-25T01:10Z", "2026-03-29T02:30", "2026-03-29T01:00Z"),
        ("Africa/Cairo", "2026-04-23T20:00Z", "00:30", "2026-04-23T22:00Z"),
        ("America/Santiago", "2026-09-05T20:00Z", "00:00", "2026-09-06T04:00Z"),
    ],
)
def test_where_clocks_change(
    zone: str, now: str, text: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    assert parse_moment("at", text, datetime.fromisoformat(now)) == datetime.fromisoformat(wanted)


_ZONES = sorted(zone for zone in available_timezones() if "/" in zone and not zone.startswith("Etc/"))
_YEARS = int(datetime(2025, 1, 1, tzinfo=UTC).timestamp()), int(datetime(2027, 1, 1, tzinfo=UTC).timestamp())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(_ZONES), st.integers(*_YEARS), st.integers(0, 1439))
def test_the_next_minute_with_that_time_or_the_first_behind_its_gap(zone: str, now: int, minute: int) -> None:
    """By looking at every minute from now on, with another library's rules of zones."""
    wanted, there = (minute // 60, minute % 60), ZoneInfo(zone)
    before = datetime.fromtimestamp(now, there)
    for at in range(now - now % 60 + 60, now + 60 * 60 * 60, 60):
        local = datetime.fromtimestamp(at, there)
        skipped = local.replace(tzinfo=None) - before.replace(tzinfo=None, second=0) != timedelta(minutes=1)
        gap = skipped and local.utcoffset() > before.utcoffset() and _between(before, wanted, local)  # type: ignore[operator]
        if (local.hour, local.minute) == wanted or gap:
            break
        before = local
    else:
        raise AssertionError("no such minute in 60 hours")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TZ", zone)
        time.tzset()
        found = parse_moment("at", f"{wanted[0]:02}:{wanted[1]:02}", datetime.fromtimestamp(now, UTC))
    assert found == datetime.fromtimestamp(at, UTC)


def _between(before: datetime, wanted: tuple[int, int], after: datetime) -> bool:
    """Whether clocks that were put forward have left this time out."""
    first = before.replace(tzinfo=None, second=0) + timedelta(minutes=1)
    last = after.replace(tzinfo=None)
    minutes = int((last - first).total_seconds()) // 60
    left_out = {(one.hour, one.minute) for one in (first + timedelta(minutes=n) for n in range(minutes))}
    return wanted in left_out


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
