"""Messages for queued jobs. If the broker does not answer, jobs are delayed and never lost."""

import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from nightmill.jobs.base.shares import QUEUE_MESSAGES
from nightmill.jobs.errors import BrokerError, DatabaseError, DeliveryDelayedWarning
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import mark_unsent

_THREADS = 2
MOST_WAITING = 256
"""Most messages waiting for the background threads; further jobs are left to a sweep at once."""

Groups = Mapping[tuple[str | None, int], Sequence[str]]
"""Job ids by (model, priority)."""


class Announcer:
    """Sends messages for committed jobs."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self._database = database
        self._broker = broker
        self._threads: ThreadPoolExecutor | None = None
        self._free = threading.Semaphore(MOST_WAITING)

    def go_apart(self) -> None:
        """Send on background threads from now on, so that a hanging broker does not block `announce`.

        For a process that does not fork.
        """
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="announcing")

    def close(self) -> None:
        """Stop sending; a worker's sweep finds the jobs whose messages were not sent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def announce(self, groups: Groups) -> bool:
        """Send messages. If the broker does not answer, leave the jobs to a worker's sweep, warn, return
        False.

        With background threads it returns True at once, since the jobs are committed and can be announced
        again.
        """
        if self._threads is None:
            return self._announce(groups)
        if not self._free.acquire(blocking=False):
            self._leave([job_id for job_ids in groups.values() for job_id in job_ids])
            return False
        try:
            sending = self._threads.submit(self._announce, groups)
        except RuntimeError:  # the process is ending
            self._free.release()
            return False
        sending.add_done_callback(lambda _: self._free.release())
        return True

    def announce_first(self, groups: Groups, room: int | None = None) -> int:
        """Send messages for the first of many jobs, and leave the others to the workers' sweeps, which send
        theirs in turn with those of others; returns the room for what comes next.

        room  what the last call returned; None: this is the first one
        """
        if room is None:
            room = self._broker.settings.shard_size * QUEUE_MESSAGES // 4
        for queue, job_ids in groups.items():
            if now := job_ids[:room]:
                self.announce({queue: now})
            if later := job_ids[room:]:
                self._leave(later)
            room -= len(now)
        return room

    def _leave(self, job_ids: Sequence[str]) -> None:
        """Mark these jobs so that a worker's sweep sends their messages soon."""
        with suppress(DatabaseError):  # then a sweep finds them by their age
            mark_unsent(self._database, job_ids)

    def _announce(self, groups: Groups) -> bool:
        delivered = True
        for (model, priority), job_ids in groups.items():
            try:
                self._broker.announce(job_ids, model, priority)
            except BrokerError as error:
                delivered = False
                self._leave(job_ids)
                jobs = "1 job is" if len(job_ids) == 1 else f"{len(job_ids)} jobs are"
                warnings.warn(
                    f"{jobs} kept in the database, and a worker will fetch them from there once the broker "
                    f"is back: {error}",
                    DeliveryDelayedWarning,
                    stacklevel=_level_of_caller(),
                )
        return delivered


def _level_of_caller() -> int:
    """Return the stack level, for `warnings.warn` in the caller, of the first frame outside this package."""
    frame, level = inspect.currentframe(), 0
    ours = __name__.partition(".")[0] + "."
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
