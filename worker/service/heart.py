"""A worker's heartbeat, from before its model is loaded until it ends."""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from nightmill.jobs.base.contract import JsonObject, WorkerState
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.sql.claims import Claims

log = logging.getLogger(__name__)

LOADING = "loading the model"
_END_SECONDS = 30.0  # for the last beat: what a statement and a connection may take


class Heart:
    """Says that the worker lives; knows whether it has a right to find others dead.

    stale_seconds  silence after which others may take this worker's jobs
    """

    def __init__(self, claims: Claims, stale_seconds: float) -> None:
        self._claims = claims
        self._stale = stale_seconds
        self._last: tuple[datetime, float] | None = None  # by the database's clock, and by this process's
        self._steady_from = 0.0

    def beat(self, state: WorkerState, detail: str | None = None, stats: JsonObject | None = None) -> bool:
        """Say that this worker lives; False where it was given up for dead. Raises DatabaseError."""
        known = self._claims.beat(state, detail, stats)
        database = self._claims.database
        if self._silent_for() >= self._stale:
            self._steady_from = database.monotonic() + self._stale
        self._last = database.now(), database.monotonic()
        return known

    @property
    def steady(self) -> bool:
        """True where it has beaten for as long as the silence for which others would be given up.

        After a pause of the machine, or of the database, everybody's last beat is long ago, and everybody is
        about to beat again. Whoever wakes first must not take it for the death of the others, or its own.
        """
        steady = self._claims.database.monotonic() >= self._steady_from
        return steady and self._silent_for() < self._stale

    def _silent_for(self) -> float:
        """Seconds since the last beat. One clock may be set back, the other stands while a machine sleeps."""
        if self._last is None:
            return math.inf
        moment, monotonic = self._last
        database = self._claims.database
        return max((database.now() - moment).total_seconds(), database.monotonic() - monotonic)

    @contextmanager
    def while_loading(self, seconds: float) -> Iterator[Callable[[str], None]]:
        """Beat every `seconds` on a thread; yields what takes the news of how far it is."""
        detail = LOADING
        done = threading.Event()

        def tell(news: str) -> None:
            nonlocal detail
            detail = f"{LOADING}: {news}"

        def run() -> None:
            while not done.wait(seconds):
                try:
                    self.beat(WorkerState.STARTING, detail)
                except DatabaseError as error:
                    log.warning("%s", error)

        self.beat(WorkerState.STARTING, detail)
        thread = threading.Thread(target=run, name="heart", daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            done.set()
            thread.join(_END_SECONDS)  # a beat that is under way has an end, too
