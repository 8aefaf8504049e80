"""Checks of uploaded files before submission: rows, errors, and expected duration.

A file is read once, on a dedicated thread, and the result is cached, as content never changes. Concurrent
requests wait for the same check.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.requests import Request

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.inputs import EndpointFile, file_error
from nightmill.jobs.server.job_service import caller_left
from nightmill.jobs.sql.dashboard_queries import DashboardQueries
from nightmill.jobs.sql.files import StoredFile

_MOST_ERRORS = 20
_MOST_ROWS = 20_000  # rows read; results for larger files are about these
_MOST_BYTES = 32 << 20  # limit for bytes of the file and characters of prompts
_LATELY = timedelta(minutes=10)
_FEWEST_ROWS = 20  # recently ended rows needed for an estimate
_PATIENCE = 5.0  # seconds that a page waits for a reading before it says that this goes on
_RETURN_SECONDS = 10.0  # in which a page that was told so asks again, or the reading ends
_MOST_READINGS = 32  # waiting or running checks
_MOST_REMEMBERED = 256  # files


@dataclass(slots=True)
class Checked:
    """The result of checking a file, as far as it was read."""

    format: str = ""
    rows: int = 0
    bad: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)  # lines, and what is wrong there
    answers: int = 0  # answers of all rows that can be run
    most_tokens: int = 0  # most tokens of these answers together
    characters: int = 0  # characters of prompts
    whole: bool = True  # False if the file has more rows
    broken: str | None = None  # why it cannot be read at all

    @property
    def good(self) -> int:
        """Number of rows that can be run."""
        return self.rows - self.bad


class Checking:
    """Checks files for the submission page, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checking")
        self._remembered: OrderedDict[str, Checked] = OrderedDict()
        self._readings: dict[str, _Reading] = {}

    def close(self) -> None:
        """End the thread at the next row."""
        for reading in self._readings.values():
            reading.over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def look(self, request: Request, file: StoredFile, path: Path) -> Checked | None:
        """Return the check of a file with content at `path`; None: still running, so ask again soon.

        Raises HttpError with status 503 if too many files are waiting.
        """
        if (found := self._remembered.get(file.id)) is not None:
            self._remembered.move_to_end(file.id)
            return found
        reading = self._readings.get(file.id) or self._begin(file, path)
        with reading.waited_for(self._drop):
            leaving = asyncio.ensure_future(caller_left(request))
            ends: set[asyncio.Future[Any]] = {reading.task, leaving}
            try:
                await asyncio.wait(ends, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                reading.left = leaving.done()
            finally:
                leaving.cancel()
        return reading.task.result() if reading.task.done() else None

    def _begin(self, file: StoredFile, path: Path) -> "_Reading":
        if len(self._readings) >= _MOST_READINGS:
            raise HttpError(503, "too many files wait to be looked at; try again later", code="busy")
        over = threading.Event()
        work = self._thread.submit(check, path, file.filename, over.is_set)
        reading = self._readings[file.id] = _Reading(file.id, over, asyncio.wrap_future(work))
        reading.task.add_done_callback(lambda task: self._end(reading))
        return reading

    def _end(self, reading: "_Reading") -> None:
        task = reading.task
        found = None if task.cancelled() or task.exception() is not None else task.result()
        # Failures are not cached, as the folder may have been unreachable.
        if found is not None and found.broken is None and not reading.over.is_set():
            self._remembered[reading.file_id] = found
            if len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        self._drop(reading)

    def _drop(self, reading: "_Reading") -> None:
        """Forget a check, so that the next request begins a new one."""
        if self._readings.get(reading.file_id) is reading:
            del self._readings[reading.file_id]


class _Reading:
    """A file being checked, with the number of waiting requests."""

    def __init__(self, file_id: str, over: threading.Event, task: "asyncio.Future[Checked]") -> None:
        self.file_id = file_id
        self.over = over
        self.task = task
        self.left = False  # the last waiting request has gone
        self._waiting = 0
        self._ending: asyncio.TimerHandle | None = None

    @contextmanager
    def waited_for(self, drop: "Callable[[_Reading], None]") -> Iterator[None]:
        """Keep the check running during this block; it is cancelled and dropped once nobody waits or
        returns."""
        self._waiting += 1
        if self._ending is not None:
            self._ending.cancel()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and not self.task.done():
                patience = 0.0 if self.left else _RETURN_SECONDS
                self._ending = asyncio.get_running_loop().call_later(patience, self._give_up, drop)

    def _give_up(self, drop: "Callable[[_Reading], None]") -> None:
        self.over.set()
        self.task.cancel()  # if it has not begun
        drop(self)


def check(path: Path, filename: str, over: Callable[[], bool] = lambda: False) -> Checked:
    """Check a file as at submission, until `over`; never raises for its content."""
    found = Checked()
    try:
        file = EndpointFile(path, None, filename)
        found.format = str(file.format)
        for row in file.rows():
            if found.rows == _MOST_ROWS or max(file.position, found.characters) > _MOST_BYTES or over():
                found.whole = False
                break
            found.rows += 1
            if row.spec is None:
                found.bad += 1
                if row.error is not None and len(found.errors) < _MOST_ERRORS:
                    found.errors.append((row.number, row.error.message))
                continue
            params = row.spec.params
            found.answers += params.n
            found.most_tokens += params.n * params.max_tokens
            found.characters += len(str(row.prompt))
    except BatchFileError as error:
        found.broken = str(file_error(error, path)["message"])
    return found


def seconds_of(found: Checked, looking: DashboardQueries) -> float | None:
    """Estimate the duration of the checked rows at the recent pace; None if unknown."""
    now = looking.now()
    (lately,) = looking.minutes(now - _LATELY, now, _LATELY)
    return found.good * _LATELY.total_seconds() / lately.rows if lately.rows >= _FEWEST_ROWS else None
