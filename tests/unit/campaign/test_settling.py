"""The end of a night of the campaign: it waits while jobs end; what the machine was late by is no fault."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.campaign import night
from tests.campaign.lateness import Late
from tests.campaign.report import Report


class Clock:
    """Time goes on by sleeping alone; of each second of a slow machine, so much is lost."""

    def __init__(self, share_lost: float) -> None:
        self.now, self.lateness, self._share = 1000.0, list[Late](), share_lost

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.lateness.append(Late(self.now, seconds * self._share))


def settled(
    monkeypatch: pytest.MonkeyPatch, left: Iterator[int], share_lost: float
) -> tuple[bool, Report, float]:
    """Whether so many jobs, as the database tells them one look after the other, come to an end; and when."""
    clock, report = Clock(share_lost), Report(seed=1)
    monkeypatch.setattr(night, "time", clock)

    def sql(query: str) -> list[Any]:
        return [[next(left)]] if "count(*) FROM jobs WHERE" in query else [["running", 1]]

    world: Any = SimpleNamespace(sql=sql)
    return night.settle(world, report, clock.lateness), report, clock.now - 1000.0


def after(seconds: float) -> Iterator[int]:
    """One job is left so long, at four looks a second."""
    yield from [1] * int(seconds * 4)
    while True:
        yield 0


@pytest.mark.parametrize(
    ("share_lost", "needs", "ends"),
    [(0.0, 59.0, True), (0.0, 62.0, False), (0.5, 119.0, True), (0.5, 122.0, False)],
)
def test_a_job_must_end_within_a_minute_of_time_that_was_to_be_had(
    monkeypatch: pytest.MonkeyPatch, share_lost: float, needs: float, ends: bool
) -> None:
    done, report, took = settled(monkeypatch, after(needs), share_lost)
    assert done is ends
    kinds = [violation.kind for _, _, violation in report.violations]
    assert kinds == ([] if ends else ["unfinished"])
    if not ends:
        ((_, _, violation),) = report.violations
        most = 60.0 / (1.0 - share_lost)
        assert violation.said.startswith("no job has ended for ") and abs(took - most) < 1.0


def test_each_end_begins_the_minute_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    left = (number for number in (3, 2, 1, 0) for _ in range(50 * 4))
    done, report, took = settled(monkeypatch, left, 0.0)
    assert done and not report.violations and took == 150.0
