"""Parsing of times on the command line: 06:00, 2026-03-01T06:00+01:00, or 8h from now."""

import re
from datetime import UTC, datetime, time, timedelta

from nightmill.jobs.errors import InvalidParameterError

_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_SPAN = re.compile(r"\+?(\d+(?:\.\d+)?)\s*([smhdw])")
_FIRST, _LAST = datetime(2, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_moment(name: str, text: str, now: datetime) -> datetime:
    """Parse a point in time; without a zone it is in this machine's zone.

    "06:00" is the next such local time after `now`; "8h" (or s, m, d, w) is so long after `now`; a date with
    time may carry a zone ("2026-03-01T06:00+01:00"), and is local without one. Where clocks are put forward
    over a local time, it is the first moment behind the gap; where they are put back over it, so that it
    comes twice, it is the next of the two. Raises InvalidParameterError, with `name` for the option.
    """
    text = text.strip()
    local = now.astimezone()
    try:
        if _CLOCK.fullmatch(text):
            wanted = time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text.zfill(8))
            days = (local.date() + timedelta(days=days) for days in (-1, 0, 1, 2))
            found = [moment for day in days for moment in _moments(datetime.combine(day, wanted))]
            return min(moment for moment in found if moment > local)
        if _SPAN.fullmatch(text):
            return on_calendar(name, (local + _span(text)).astimezone())
        # The zone is applied here, as that fails at the ends of the calendar.
        moment = None if _is_date(text) else _local(datetime.fromisoformat(text), local)
    except (ValueError, OverflowError):
        moment = None
    if moment is None:
        raise InvalidParameterError(
            f"{name}: {text!r} is not a time; write 06:00 (the next one), 2026-03-01T06:00+01:00, or 8h for "
            "8 hours from now",
            field=name,
        )
    return on_calendar(name, moment)


def _local(said: datetime, now: datetime) -> datetime:
    if said.tzinfo is not None:
        return said.astimezone()
    first, *others = _moments(said)
    return next((moment for moment in (first, *others) if moment > now), first)


def _moments(said: datetime) -> list[datetime]:
    """Return the moments at which local clocks show a time: one, two where clocks are put back, or the first
    after a gap."""
    either = [said.replace(fold=fold).astimezone() for fold in (0, 1)]
    shown = [moment for moment in either if moment.replace(tzinfo=None) == said]
    if shown:
        return sorted(set(shown), key=datetime.timestamp)
    # In a gap: the offset before it gives a moment behind it, the one behind it a moment before it.
    before, behind = (int(moment.timestamp()) for moment in sorted(either, key=datetime.timestamp))
    offset = _offset(before)
    while behind - before > 1:
        middle = (before + behind) // 2
        before, behind = (middle, behind) if _offset(middle) == offset else (before, middle)
    return [datetime.fromtimestamp(behind, UTC).astimezone()]


def _offset(timestamp: int) -> timedelta | None:
    return datetime.fromtimestamp(timestamp, UTC).astimezone().utcoffset()


def on_calendar(name: str, moment: datetime) -> datetime:
    """Return `moment` if it can be shown in every zone with a day to spare; raises InvalidParameterError
    otherwise."""
    if not _FIRST <= moment <= _LAST:
        raise InvalidParameterError(
            f"{name}: {moment.isoformat()!r} lies beyond the calendar; name a time of the years 2 to 9998",
            field=name,
        )
    return moment


def parse_span(name: str, text: str) -> timedelta:
    """Parse a duration: 90s, 30m, 8h, 30d, 8w. Raises InvalidParameterError with `name`."""
    try:
        return _span(text.strip())
    except (ValueError, OverflowError):
        raise InvalidParameterError(
            f"{name}: {text!r} is not a duration; write a number and s, m, h, d or w, as in 30d", field=name
        ) from None


def _span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return timedelta(**{_UNITS[found[2]]: float(found[1])})


def describe_moment(moment: datetime) -> str:
    """Format a point in time for people: local, with its zone."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-?(\d{2}|W\d{2})-?\d{1,2}", text) is not None
