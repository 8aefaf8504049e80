"""The first page: how the night stands. And the list of batches, of all or of whoever looks."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nightmill.jobs.batch_status import BatchState, BatchStatus
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.contract import JobState
from nightmill.jobs.errors import BatchNotFoundError, InvalidParameterError
from nightmill.jobs.job import Worker
from nightmill.jobs.server.counted import Counted
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.pages.plot import Plot, draw
from nightmill.jobs.server.pages.standings import Standings
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore
from nightmill.jobs.sql.looking import Looking
from nightmill.jobs.sql.workers import LIVE

MOST_BATCHES = 20
_ORDER = (BatchState.RUNNING, BatchState.SUBMITTING, BatchState.QUEUED, BatchState.SCHEDULED)
_TONIGHT = timedelta(hours=12)
_EVERY = timedelta(minutes=5)
_NOW = timedelta(minutes=1)
_MOST_WORKERS = 24
_MOST_RUNNING = 200  # batches among which those that a caller may see are looked for


@dataclass(frozen=True, slots=True)
class Night:
    """The last hours of all jobs."""

    queued: int
    running: int
    ended: dict[JobState, int]
    rate: float  # tokens a second of what ended in the last minute
    tokens: int  # of what ended
    plot: Plot | None


@dataclass(frozen=True, slots=True)
class Shown:
    """A batch on a page; `http` if it came over HTTP."""

    status: BatchStatus
    http: HttpBatch | None

    @property
    def title(self) -> str:
        """Its name for people."""
        return (self.http and self.http.name) or self.status.name

    @property
    def late(self) -> bool | None:
        """Whether its end is expected after its deadline; None if nobody can say."""
        end, deadline = self.status.estimated_end, self.status.deadline_at
        return None if end is None or deadline is None else end > deadline

    @property
    def rows(self) -> int:
        """Of the file, or as many as there are."""
        return self.status.expected_rows


class Watch:
    """Reads from SQL what the pages show."""

    def __init__(self, desk: Desk, http: HttpBatchStore) -> None:
        self._desk = desk
        self.standings = Standings(desk.look)
        self._http = http
        self.looking = Looking(desk.client.database)
        nothing = Night(0, 0, {}, 0.0, 0, None)
        self._night: Counted[Night] = Counted(self._count, nothing)

    def night(self) -> Night:
        """How all jobs stand."""
        self._night.look()
        return self._night.found

    def _count(self) -> Night:
        now = self.looking.now()
        until = now.replace(minute=now.minute - now.minute % 5, second=0, microsecond=0) + _EVERY
        minutes = self.looking.minutes(until - _TONIGHT, until, _EVERY)
        lately = self.looking.minutes(now - _NOW, now, _NOW)
        return Night(
            **self.looking.waiting(),
            ended=self.looking.ended(until - _TONIGHT),
            rate=sum(minute.tokens for minute in lately) / _NOW.total_seconds(),
            tokens=sum(minute.tokens for minute in minutes),
            plot=draw(minutes, _EVERY),
        )

    def workers(self, now: datetime) -> list[dict[str, Any]]:
        """Those that live, and those that ended lately; the ones that live first."""
        stale = timedelta(seconds=self._desk.client.settings.stale_seconds)
        lately = [one for one in self._desk.client.workers() if now - one.heartbeat_at < _TONIGHT]
        found = [
            {"worker": one, "live": (live := _lives(one, now, stale)), "said": _said(one, live)}
            for one in lately[:_MOST_WORKERS]
        ]
        return sorted(found, key=lambda one: not one["live"])

    async def batches(self, caller: Caller) -> list[Shown]:
        """What runs, what waits, then what has ended: of each the newest first."""
        found = await self._desk.look(self._newest, caller)
        standing = await asyncio.gather(*(self._shown_of(*one) for one in found))
        shown = [one for one in standing if one is not None]
        return sorted(shown, key=_place)[:MOST_BATCHES]

    def _newest(self, caller: Caller) -> list[tuple[Batch, HttpBatch | None]]:
        """The batches of this caller that run, and the newest; not more of either than are shown."""
        batches = self._desk.client.batches
        running = [(one, self._http_of(one.name)) for one in batches.running(_MOST_RUNNING)]
        if caller.only is None:
            newest = [(one, self._http_of(one.name)) for one in batches.newest(MOST_BATCHES)]
        else:
            running = [(one, http) for one, http in running if http is not None and caller.sees(http.owner)]
            owned = self._http.page(owner=caller.only, after=None, oldest_first=False, limit=MOST_BATCHES)
            newest = [(batch, http) for http in owned if (batch := self._entered(http.batch)) is not None]
        return list({one.name: (one, http) for one, http in running[:MOST_BATCHES] + newest}.values())

    def batch(self, caller: Caller, name: str) -> tuple[Batch, HttpBatch | None]:
        """A batch that there is for this caller; raises HttpError."""
        http = self._http_of(name)
        try:
            batch = self._desk.client.get_batch(name)
        except (BatchNotFoundError, InvalidParameterError):
            batch = None
        if batch is None or not caller.sees(None if http is None else http.owner):
            raise HttpError(404, "there is no such batch", code="batch_not_found")
        return batch, http

    async def _shown_of(self, batch: Batch, http: HttpBatch | None) -> Shown | None:
        try:
            return Shown(await self.standings.of(batch), http)
        except BatchNotFoundError:  # it was deleted just now
            return None

    def _entered(self, name: str) -> Batch | None:
        try:
            return self._desk.client.get_batch(name)
        except BatchNotFoundError:  # nothing is entered yet
            return None

    def _http_of(self, name: str) -> HttpBatch | None:
        return self._http.get(name.removeprefix(BATCH_PREFIX)) if name.startswith(BATCH_PREFIX) else None


def _place(shown: Shown) -> tuple[int, float]:
    """Where a batch stands in a list."""
    state = shown.status.state
    order = _ORDER.index(state) if state in _ORDER else len(_ORDER)
    return order, -shown.status.created_at.timestamp()


def open_batch(status: BatchStatus) -> bool:
    """Whether there is anything left to cancel."""
    return not status.state.final or status.state is BatchState.SUBMITTING


def _lives(worker: Worker, now: datetime, stale: timedelta) -> bool:
    return worker.state in LIVE and now - worker.heartbeat_at < stale


def _said(worker: Worker, live: bool) -> str:
    """Its state in a word."""
    return str(worker.state) if live or worker.state not in LIVE else "silent"
