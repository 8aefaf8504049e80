"""What a file holds that was uploaded: its rows, those that cannot be run, and how long it may take.

A file is read once, on a thread of its own that no statement waits for, and what was found is remembered: the
content of a file never changes. Who asks meanwhile waits for the same reading.
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
from nightmill.jobs.server.desk import caller_left
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.inputs import EndpointFile, file_error
from nightmill.jobs.sql.files import StoredFile
from nightmill.jobs.sql.looking import Looking

_MOST_ERRORS = 20
_MOST_ROWS = 20_000  # that are read; what is said of larger files is said of these
_MOST_BYTES = 32 << 20  # of the file, and characters of prompts
_LATELY = timedelta(minutes=10)
_FEWEST_ROWS = 20  # that ended lately, for their pace to say anything
_PATIENCE = 5.0  # seconds that a page waits for a reading before it says that this goes on
_RETURN_SECONDS = 10.0  # in which a page that was told so asks again, or the reading ends
_MOST_READINGS = 32  # that wait or go on
_MOST_REMEMBERED = 256  # files


@dataclass(slots=True)
class Checked:
    """A file as far as it was read."""

    format: str = ""
    rows: int = 0
    bad: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)  # lines, and what is wrong there
    answers: int = 0  # of all rows that can be run
    most_tokens: int = 0  # that these answers may have together
    characters: int = 0  # of prompts
    whole: bool = True  # False: there are more rows than were read
    broken: str | None = None  # why it cannot be read at all

    @property
    def good(self) -> int:
        """Rows that can be run."""
        return self.rows - self.bad


class Checking:
    """Reads files for the page that shows what they hold, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checking")
        self._remembered: OrderedDict[str, Checked] = OrderedDict()
        self._readings: dict[str, _Reading] = {}

    def close(self) -> None:
        """End the thread at the next row that it reads."""
        for reading in self._readings.values():
            reading.over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def look(self, request: Request, file: StoredFile, path: Path) -> Checked | None:
        """What a file holds, whose content is at `path`; None: it is still being read, so ask again soon.

        Raises HttpError with status 503 where too many files wait to be read.
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
        # One that cannot be read is read again: it may have been the folder that was away.
        if found is not None and found.broken is None and not reading.over.is_set():
            self._remembered[reading.file_id] = found
            if len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        self._drop(reading)

    def _drop(self, reading: "_Reading") -> None:
        """Let nobody wait for it any more: who asks again begins a new one."""
        if self._readings.get(reading.file_id) is reading:
            del self._readings[reading.file_id]


class _Reading:
    """One file that is being read, and how many wait for it."""

    def __init__(self, file_id: str, over: threading.Event, task: "asyncio.Future[Checked]") -> None:
        self.file_id = file_id
        self.over = over
        self.task = task
        self.left = False  # who waited last has gone away
        self._waiting = 0
        self._ending: asyncio.TimerHandle | None = None

    @contextmanager
    def waited_for(self, drop: "Callable[[_Reading], None]") -> Iterator[None]:
        """Meanwhile the reading goes on; it ends, and is dropped, if nobody waits for it or comes back."""
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
    """Read a file as it would be when it is handed in, until `over`; never raises for what is in it."""
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


def seconds_of(found: Checked, looking: Looking) -> float | None:
    """How long the rows that were read may take, at the pace of rows lately; None if that is not known."""
    now = looking.now()
    (lately,) = looking.minutes(now - _LATELY, now, _LATELY)
    return found.good * _LATELY.total_seconds() / lately.rows if lately.rows >= _FEWEST_ROWS else None
