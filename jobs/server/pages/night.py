"""Data of the start page and of the list of batches, for all or for one caller."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.errors import BatchNotFoundError, InvalidParameterError
from nightmill.jobs.reply.batch_status import BatchState, BatchStatus, unserved_sentence
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.server.counted import Counted
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.pages.batch_status_cache import BatchStatusCache
from nightmill.jobs.server.pages.plot import Plot, draw
from nightmill.jobs.server.pages.rendering import moment
from nightmill.jobs.sql.dashboard_queries import DashboardQueries
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore
from nightmill.jobs.sql.workers import LIVE

MOST_BATCHES = 20
_ORDER = (BatchState.RUNNING, BatchState.SUBMITTING, BatchState.QUEUED, BatchState.SCHEDULED)
_TONIGHT = timedelta(hours=12)
_EVERY = timedelta(minutes=5)
_NOW = timedelta(minutes=1)
_MOST_WORKERS = 24
_MOST_RUNNING = 200  # batches that are searched for those visible to a caller


@dataclass(frozen=True, slots=True)
class NightSummary:
    """Statistics of all jobs in the last hours."""

    queued: int
    running: int
    ended: dict[JobState, int]
    rate: float  # tokens a second of what ended in the last minute
    tokens: int  # tokens of ended jobs
    plot: Plot | None


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """A batch on a page, with its HTTP batch if it has one."""

    status: BatchStatus
    http: HttpBatch | None
    file: str | None = None  # name of the uploaded file, if that still exists

    @property
    def title(self) -> str:
        """Its name for people."""
        return (self.http and self.http.name) or self.file or self.status.name

    @property
    def metadata(self) -> str:
        """Its metadata on one line."""
        pairs = self.http.meta.items() if self.http else ()
        return ", ".join(f"{name}: {value}" for name, value in pairs)

    @property
    def waits(self) -> str | None:
        """A sentence about workers that its rows wait for, if any."""
        if self.status.wakes_at is not None:
            return f"its workers sleep until their hours begin, at {moment(self.status.wakes_at)}"
        deadline = moment(self.status.deadline_at) or None
        return unserved_sentence(self.status.unserved, deadline) if self.status.unserved else None

    @property
    def late(self) -> bool | None:
        """True if it is expected to end after its deadline; None if unknown."""
        end, deadline = self.status.estimated_end, self.status.deadline_at
        return None if end is None or deadline is None else end > deadline

    @property
    def rows(self) -> int:
        """Rows of the file, or those entered."""
        return self.status.expected_rows


class Watch:
    """Reads the data of pages from SQL."""

    def __init__(self, service: JobService, http: HttpBatchStore) -> None:
        self._service = service
        self.status_cache = BatchStatusCache(service.look)
        self._http = http
        self._files = FileStore(service.client.database)
        self.looking = DashboardQueries(service.client.database)
        nothing = NightSummary(0, 0, {}, 0.0, 0, None)
        self._night: Counted[NightSummary] = Counted(self._count, nothing)

    def night(self) -> NightSummary:
        """Return the statistics of all jobs."""
        self._night.look()
        return self._night.found

    def _count(self) -> NightSummary:
        now = self.looking.now()
        until = now.replace(minute=now.minute - now.minute % 5, second=0, microsecond=0) + _EVERY
        minutes = self.looking.minutes(until - _TONIGHT, until, _EVERY)
        lately = self.looking.minutes(now - _NOW, now, _NOW)
        return NightSummary(
            **self.looking.waiting(),
            ended=self.looking.ended(until - _TONIGHT),
            rate=sum(minute.tokens for minute in lately) / _NOW.total_seconds(),
            tokens=sum(minute.tokens for minute in minutes),
            plot=draw(minutes, _EVERY),
        )

    def workers(self, now: datetime) -> list[dict[str, Any]]:
        """Return live workers, then recently ended ones."""
        stale = timedelta(seconds=self._service.client.settings.stale_seconds)
        lately = [one for one in self._service.client.workers() if now - one.heartbeat_at < _TONIGHT]
        found = [
            {"worker": one, "live": (live := _lives(one, now, stale)), "said": _said(one, live)}
            for one in lately[:_MOST_WORKERS]
        ]
        return sorted(found, key=lambda one: not one["live"])

    async def batches(self, caller: Caller) -> list[ShownBatch]:
        """Return running, waiting, then ended batches, the newest of each first."""
        found = await self._service.look(self._newest, caller)
        files = await self._service.look(
            self._files.filenames, [http.input_file for _, http in found if http]
        )
        cached = await asyncio.gather(
            *(
                self._shown_of(batch, http, files.get(http.input_file) if http else None)
                for batch, http in found
            )
        )
        shown = [one for one in cached if one is not None]
        return sorted(shown, key=_place)[:MOST_BATCHES]

    def _newest(self, caller: Caller) -> list[tuple[Batch, HttpBatch | None]]:
        """Return this caller's running and newest batches, at most as many as are shown."""
        batches = self._service.client.batches
        running = [(one, self._http_of(one.name)) for one in batches.running(_MOST_RUNNING)]
        if caller.only is None:
            newest = [(one, self._http_of(one.name)) for one in batches.newest(MOST_BATCHES)]
        else:
            running = [(one, http) for one, http in running if http is not None and caller.sees(http.owner)]
            owned = self._http.page(owner=caller.only, after=None, oldest_first=False, limit=MOST_BATCHES)
            newest = [(batch, http) for http in owned if (batch := self._entered(http.batch)) is not None]
        return list({one.name: (one, http) for one, http in running[:MOST_BATCHES] + newest}.values())

    def batch(self, caller: Caller, name: str) -> tuple[Batch, HttpBatch | None]:
        """Return a batch visible to this caller; raises HttpError."""
        http = self._http_of(name)
        try:
            batch = self._service.client.get_batch(name)
        except (BatchNotFoundError, InvalidParameterError):
            batch = None
        if batch is None or not caller.sees(None if http is None else http.owner):
            raise HttpError(404, "there is no such batch", code="batch_not_found")
        return batch, http

    def filename(self, http: HttpBatch | None) -> str | None:
        """Return the name of an HTTP batch's file, if it still exists."""
        return None if http is None else self._files.filenames([http.input_file]).get(http.input_file)

    async def _shown_of(self, batch: Batch, http: HttpBatch | None, file: str | None) -> ShownBatch | None:
        try:
            return ShownBatch(await self.status_cache.of(batch), http, file)
        except BatchNotFoundError:  # deleted meanwhile
            return None

    def _entered(self, name: str) -> Batch | None:
        try:
            return self._service.client.get_batch(name)
        except BatchNotFoundError:  # no row is entered yet
            return None

    def _http_of(self, name: str) -> HttpBatch | None:
        return self._http.get(name.removeprefix(BATCH_PREFIX)) if name.startswith(BATCH_PREFIX) else None


def _place(shown: ShownBatch) -> tuple[int, float]:
    """Return the sort key of a batch in a list."""
    state = shown.status.state
    order = _ORDER.index(state) if state in _ORDER else len(_ORDER)
    return order, -shown.status.created_at.timestamp()


def open_batch(status: BatchStatus) -> bool:
    """Return True if there is anything left to cancel."""
    return not status.state.final or status.state is BatchState.SUBMITTING


def _lives(worker: Worker, now: datetime, stale: timedelta) -> bool:
    return worker.state in LIVE and now - worker.heartbeat_at < stale


def _said(worker: Worker, live: bool) -> str:
    """Return a worker's state in a word."""
    return str(worker.state) if live or worker.state not in LIVE else "silent"
