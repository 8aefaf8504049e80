"""Times of day in which a worker may use its GPU, such as `22:00-06:00/Europe/Berlin`.

Windows are of the clock on the wall of a time zone: the machine's, if none is named. A window whose end is
not after its begin goes past midnight. When clocks change, the wall counts: 22:00-06:00 is an hour shorter in
the night in which clocks go forward.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Self
from zoneinfo import ZoneInfo

__all__ = ["Hours", "begin_within", "end_within"]

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\s*-\s*([01]\d|2[0-3]):([0-5]\d)")
_MINUTE = timedelta(minutes=1)
_MOST_MINUTES = (
    60 * 24 * 3
)  # a window comes every day; clocks change by hours at most, once in a while by a day
_FORM = "must be windows such as 22:00-06:00, or 12:00-13:00,22:00-06:00/Europe/Berlin with a time zone"


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows of a day, each as (begin, end) in minutes since midnight, and the name of their zone."""

    windows: tuple[tuple[int, int], ...]
    zone: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form of `--hours`; raises ValueError with the remedy."""
        windows, slash, zone = text.strip().partition("/")
        parts = [_WINDOW.fullmatch(part.strip()) for part in windows.split(",")]
        if not all(parts) or (slash and not zone):
            raise ValueError(_FORM)
        found = [tuple(map(int, part.groups())) for part in parts if part]
        spans = tuple((hour * 60 + minute, to * 60 + past) for hour, minute, to, past in found)
        for begin, end in spans:
            if begin == end:
                raise ValueError(
                    f"{_clock(begin)}-{_clock(end)} is empty, or the whole day; leave hours out for that"
                )
        hours = cls(spans, zone or None)
        if zone:
            try:
                ZoneInfo(zone)
            except (KeyError, ValueError, OSError):
                raise ValueError(
                    f"{zone[:60]!r} is not a time zone; give one such as Europe/Berlin"
                ) from None
        return hours

    def __str__(self) -> str:
        windows = ",".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.windows)
        return windows if self.zone is None else f"{windows}/{self.zone}"

    def local(self, moment: datetime) -> datetime:
        """Convert an aware moment to the clock on the wall."""
        return moment.astimezone(None if self.zone is None else ZoneInfo(self.zone))

    def open_at(self, moment: datetime) -> bool:
        """Return True if an aware moment lies in a window."""
        local = self.local(moment)
        minute = local.hour * 60 + local.minute
        return any(
            begin <= minute < end if begin < end else minute >= begin or minute < end
            for begin, end in self.windows
        )

    def next_change(self, moment: datetime) -> datetime | None:
        """Return the first minute after an aware moment at which `open_at` changes, in UTC.

        None if it never does: windows may cover the whole day.
        """
        return _next_change(self, moment.astimezone(UTC).replace(second=0, microsecond=0))


_MOST_CHANGES = 2_000  # hundreds of nights; a forecast beyond is none


def begin_within(hours: Sequence[Hours], moment: datetime) -> datetime:
    """Return the first moment from this one on at which one of these hours is open; itself without hours."""
    if not hours or any(one.open_at(moment) for one in hours):
        return moment
    openings = [change for one in hours if (change := one.next_change(moment)) is not None]
    return min(openings, default=moment)


def end_within(hours: Sequence[Hours], moment: datetime, seconds: float) -> datetime:
    """Return when so many seconds of open time have passed from a moment on; without hours, all is open.

    hours  of several workers: it is open while one of them is
    """
    left = timedelta(seconds=seconds)
    for _ in range(_MOST_CHANGES):
        changes = [change for one in hours if (change := one.next_change(moment)) is not None]
        is_open = not hours or any(one.open_at(moment) for one in hours)
        if not changes or (is_open and moment + left <= min(changes)):
            break
        if is_open:
            left -= min(changes) - moment
        moment = min(changes)
    return moment + left


@lru_cache(maxsize=256)
def _next_change(hours: Hours, minute: datetime) -> datetime | None:
    now = hours.open_at(minute)
    later = (minute + count * _MINUTE for count in range(1, _MOST_MINUTES))
    return next((one for one in later if hours.open_at(one) is not now), None)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
