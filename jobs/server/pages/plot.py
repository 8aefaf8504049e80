"""A plot of tokens per second as SVG shapes, drawn here so that no script is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nightmill.jobs.sql.dashboard_queries import Minute

WIDTH, HEIGHT = 960, 180
_LEFT, _BOTTOM, _TOP = 60, 24, 10
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Plot:
    """Coordinates of lines and labels; `area` and `line` are SVG paths."""

    area: str
    line: str
    levels: list[tuple[float, float]]  # tokens a second, and y
    hours: list[tuple[datetime, float]]  # and x
    most: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    floor: int = HEIGHT - _BOTTOM


def draw(minutes: Sequence[Minute], every: timedelta) -> Plot | None:
    """Draw the plot; None if no job ended."""
    rates = [minute.tokens / every.total_seconds() for minute in minutes]
    if not any(rates):
        return None
    top = _round_up(max(rates))
    floor, room = HEIGHT - _BOTTOM, WIDTH - _LEFT
    across = room / max(1, len(rates) - 1)
    points = [(_LEFT + at * across, floor - rate / top * (floor - _TOP)) for at, rate in enumerate(rates)]
    line = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    area = f"{line} L{points[-1][0]:.1f} {floor} L{_LEFT} {floor} Z"
    begin, whole = minutes[0].begin, minutes[-1].begin - minutes[0].begin
    steps = [hours for hours in (1, 2, 3, 6, 12) if whole / timedelta(hours=hours) <= 8] or [24]
    first = begin.replace(minute=0, second=0, microsecond=0)
    marks = []
    for _ in range(200):
        first += timedelta(hours=1)
        if first > minutes[-1].begin:
            break
        if first.hour % steps[0] == 0:
            marks.append((first, _LEFT + (first - begin) / whole * room))
    levels = [(top * part / 2, floor - part / 2 * (floor - _TOP)) for part in (1, 2)]
    return Plot(area, line, levels, marks, max(rates))


def _round_up(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in _STEPS if power * step >= value)
