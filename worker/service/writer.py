"""Results into SQL: completions of many jobs are grouped into one transaction."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import DatabaseError, DatabaseRefusedError
from nightmill.jobs.sql.claims import Outcome
from nightmill.worker.watched import watched_thread

log = logging.getLogger(__name__)

LARGEST_GROUP = 512
LINGER_SECONDS = 0.01  # waiting this long turns the completions of a step into one commit
# From a group of several to the next: at night some jobs end at every step, and a commit for each takes the
# interpreter from those who claim. A lone job never waits for this.
PACE_SECONDS = 0.05
_LONGEST_PAUSE = 5.0
_END_SECONDS = 30.0  # for the groups that are queued when the worker ends


class ResultWriter:
    """A thread that writes outcomes, and tells when they are safe.

    A database that does not answer delays results, it does not lose them: the group is tried again until
    it succeeds or the writer is closed. A group that the database refuses is halved until the one that it
    does not take is alone: that job fails. `give_up` is for one whose failure is refused, too.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Outcome]], int],
        on_written: Callable[[Sequence[Outcome]], None],
        give_up: Callable[[Outcome, str], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._write = write
        self._on_written = on_written
        self._give_up = give_up
        self._queue: SimpleQueue[Outcome | None] = SimpleQueue()
        self._closing = threading.Event()
        self._last_group_at = -math.inf
        self._thread = watched_thread("writer", self._run, on_failure)
        self._thread.start()

    def put(self, outcome: Outcome) -> None:
        """Queue an outcome."""
        self._queue.put(outcome)

    def close(self) -> None:
        """Write what is queued (one try, if the database is away) and end the thread, in bounded time."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            log.error("results are still being written: the database hangs; their jobs will run again")

    def _run(self) -> None:
        while True:
            group, closed = self._next_group()
            if group:
                if len(group) > 1:  # a night; somebody may be waiting for a lone one
                    self._last_group_at = time.monotonic()
                self._write_all(group)
                self._on_written(group)
            if closed:
                return

    def _next_group(self) -> tuple[list[Outcome], bool]:
        group: list[Outcome] = []
        item = self._queue.get()
        linger_until = max(time.monotonic() + LINGER_SECONDS, self._last_group_at + PACE_SECONDS)
        while item is not None:
            group.append(item)
            if len(group) >= LARGEST_GROUP:
                return group, False
            try:
                item = self._queue.get(timeout=max(0.0, linger_until - time.monotonic()))
            except Empty:
                return group, False
        return group, True

    def _write_all(self, group: Sequence[Outcome]) -> None:
        """Write a group, except for what the database refuses of it."""
        try:
            self._write_until_done(group)
        except DatabaseRefusedError as error:
            if len(group) == 1:
                self._write_failure(group[0], f"the result could not be stored: {error}")
                return
            middle = len(group) // 2
            self._write_all(group[:middle])
            self._write_all(group[middle:])

    def _write_failure(self, outcome: Outcome, reason: str) -> None:
        """Nothing of a refused result is kept: which of its values was the cause, nobody knows."""
        log.warning("job %s fails: %s", outcome.job_id, reason)
        try:
            self._write_until_done(
                [Outcome(outcome.job_id, outcome.attempt, StopReason.ERROR, "", 0, 0, error=reason)]
            )
        except DatabaseRefusedError as error:
            log.error("not even the failure of job %s could be stored: %s", outcome.job_id, error)
            self._give_up(outcome, reason)

    def _write_until_done(self, group: Sequence[Outcome]) -> None:
        """Write a group, however long the database is away. Raises DatabaseRefusedError."""
        pause = 0.1
        while True:
            try:
                written = self._write(group)
            except DatabaseRefusedError:
                raise
            except DatabaseError as error:
                if self._closing.is_set():
                    log.error(
                        "%d results could not be written (%s); their jobs will run again", len(group), error
                    )
                    return
                log.warning("%d results wait: %s", len(group), error)
                self._closing.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if written < len(group):
                log.warning(
                    "%d of %d results were not written: their jobs had been taken by another worker",
                    len(group) - written,
                    len(group),
                )
            return
