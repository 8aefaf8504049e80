"""The judge of time: every caller has an answer within its limit, and who was asked to end has ended.

Pure functions over what was written down, as `oracle` has them for jobs. All times are monotonic.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.campaign.lateness import Late, lost
from tests.campaign.ledger import Call
from tests.campaign.oracle import Violation


@dataclass
class Ending:
    """A process that was asked to end."""

    who: str
    pid: int
    grace: float
    asked: float
    ended: float | None = None  # None: it still runs
    killed: bool = False  # the campaign gave up waiting, and killed it
    hung: str = ""  # what stood still when it was asked


@dataclass
class Stop:
    """A process was stopped (SIGSTOP) meanwhile."""

    who: str
    pid: int
    began: float
    ended: float | None = None  # None: it still is


@dataclass(frozen=True)
class Timing:
    """All that the judge of time looks at."""

    calls: Sequence[Call]
    endings: Sequence[Ending]
    stops: Sequence[Stop]
    lateness: Sequence[Late]
    until: float  # when looking ended


def judge_time(timing: Timing) -> Iterator[Violation]:
    """Every violation there is."""
    yield from _calls(timing)
    yield from _endings(timing)


def _calls(timing: Timing) -> Iterator[Violation]:
    for call in timing.calls:
        ended = timing.until if call.ended is None else call.ended
        stops = [stop for stop in timing.stops if stop.who == call.keeper]
        limit = call.limit + _extra(stops, timing, call.began, ended)
        took = ended - call.began
        if call.ended is None and took > limit:
            said = f"{call.what} had no answer in {took:.1f} s, {limit:.1f} s are allowed"
            yield Violation("no-answer", said)
        elif call.ended is not None and took > limit:
            said = f"{call.what} was answered after {took:.1f} s, {limit:.1f} s are allowed"
            yield Violation("late-answer", said)


def _endings(timing: Timing) -> Iterator[Violation]:
    for ending in timing.endings:
        ended = timing.until if ending.ended is None else ending.ended
        stops = [stop for stop in timing.stops if stop.pid == ending.pid]
        limit = ending.grace + _extra(stops, timing, ending.asked, ended)
        took = ended - ending.asked
        beside = f", beside {ending.hung}" if ending.hung else ""
        if took > limit:
            verb = "still runs" if ending.ended is None or ending.killed else "ended"
            said = f"{ending.who} {verb} {took:.1f} s after SIGTERM{beside}; {limit:.1f} s are allowed"
            yield Violation("never-ends", said)


def _extra(stops: Iterable[Stop], timing: Timing, began: float, ended: float) -> float:
    """What is added to a limit: the time that a process was stopped, and that the machine was late."""
    return stopped(stops, began, ended) + lost(timing.lateness, began, ended)


def stopped(stops: Iterable[Stop], began: float, ended: float) -> float:
    """Seconds between two times in which a process was stopped; stops may overlap."""
    seconds, reached = 0.0, began
    for stop in sorted(stops, key=lambda stop: stop.began):
        start = max(reached, stop.began)
        end = min(ended, ended if stop.ended is None else stop.ended)
        if end > start:
            seconds += end - start
            reached = end
    return seconds
