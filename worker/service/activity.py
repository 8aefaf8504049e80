"""Samples what this worker spends its time on, and writes it to SQL in groups."""

from collections import Counter
from datetime import datetime, timedelta

from nightmill.jobs.sql.activity import ROW, ActivityStore
from nightmill.worker.service.shards import Service

LOOK_SECONDS = 1.0
WRITE_SECONDS = 60.0
_LONGEST = timedelta(seconds=30)  # between two looks; longer, the machine was suspended or its clock set
_FEW_PAGES = 8  # an eighth of all: with fewer, sequences that wait do so for pages


class Activity:
    """Adds up what the worker does between two looks, and says so in `activity` once a minute."""

    def __init__(self, store: ActivityStore, worker_id: str, model: str, service: Service) -> None:
        self._store = store
        self._worker_id = worker_id
        self._model = model
        self._service = service
        self._begin(store.database.now())

    def _begin(self, now: datetime) -> None:
        self._seconds: Counter[str] = Counter()
        self._began = self._looked = self._written = now

    def look(self) -> None:
        """Count the time since the last look for what the worker does now. Raises DatabaseError."""
        now = self._store.database.now()
        since, self._looked = now - self._looked, now
        if not timedelta() <= since <= _LONGEST:  # nobody knows what happened meanwhile
            self.write()
            self._begin(now)
            return
        self._seconds[self._kind()] += since.total_seconds()  # type: ignore[assignment]
        if (now - self._written).total_seconds() >= WRITE_SECONDS:
            self.write()
            self._written = now
            if now - self._began + timedelta(seconds=WRITE_SECONDS) > ROW:
                self._begin(now)

    def write(self) -> None:
        """Write what is known so far. Raises DatabaseError."""
        if self._seconds:
            ended = self._began + timedelta(seconds=sum(self._seconds.values()))
            self._store.record(self._worker_id, self._model, self._began, ended, dict(self._seconds))

    def _kind(self) -> str:
        stats = self._service.engine.stats
        if stats.running:
            short = stats.free_pages * _FEW_PAGES < stats.pages and stats.running < stats.sequences
            return "memory" if stats.waiting and short else "computing"
        return "messages" if self._service.in_flight.idle else "tokenizer"
