"""When a worker frees its GPU and sleeps: outside its hours, without jobs for long, or paused by hand."""

import time
from collections.abc import Sequence
from datetime import datetime

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.hours import Hours
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.reply.job import IDLE, UNTIL
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.service.in_flight import InFlight

__all__ = ["RestRule", "Resting"]


class RestRule:
    """The reasons for which a worker sleeps.

    models  those whose jobs it takes; None: jobs without a model
    """

    def __init__(self, claims: Claims, settings: Settings, models: Sequence[str | None]) -> None:
        self._claims = claims
        self._hours = None if settings.hours is None else Hours.parse(settings.hours)
        self._idle_seconds = settings.idle_seconds
        self._models = models

    def reason(self, idle_for: float) -> str | None:
        """Return why the worker is to sleep, for people; None: it is to serve. Raises DatabaseError.

        idle_for  seconds since it last had a job
        """
        if self._claims.paused():
            return "paused, until it is resumed"
        now = self._claims.database.now()
        if self._hours is not None and not self._hours.open_at(now):
            return f"{UNTIL}{self._opening(self._hours, now)}"
        if (
            self._idle_seconds is None
            or idle_for < self._idle_seconds
            or self._claims.jobs_wait(self._models)
        ):
            return None
        return IDLE

    def stats(self) -> JsonObject | None:
        """Return what a sleeping worker says of itself with each heartbeat."""
        return None if self._hours is None else {"hours": str(self._hours)}

    def _opening(self, hours: Hours, now: datetime) -> str:
        opening = hours.next_change(now)
        assert opening is not None  # it is closed now, and has a window
        return f"{hours.local(opening):%H:%M} ({hours})"


class Resting:
    """Decides for a worker that serves: `look` is called now and then."""

    def __init__(self, rule: RestRule, in_flight: InFlight) -> None:
        self._rule = rule
        self._in_flight = in_flight
        self._busy_at = time.monotonic()

    def look(self) -> str | None:
        """Return why the worker is to sleep now; None: it is to go on. Raises DatabaseError."""
        if not self._in_flight.idle:
            self._busy_at = time.monotonic()
        return self._rule.reason(time.monotonic() - self._busy_at)
