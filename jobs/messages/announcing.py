"""Messages for queued jobs. A broker that does not answer delays jobs, and loses none."""

import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from nightmill.jobs.errors import BrokerError, DatabaseError, DeliveryDelayedWarning
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import mark_unsent

_THREADS = 2
MOST_WAITING = 256
"""Messages that wait for these threads; jobs beyond that are left to a sweep at once."""

Groups = Mapping[tuple[str | None, int], Sequence[str]]
"""(model, priority) -> ids of jobs."""


class Announcer:
    """Sends messages for jobs that are committed already."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self._database = database
        self._broker = broker
        self._threads: ThreadPoolExecutor | None = None
        self._free = threading.Semaphore(MOST_WAITING)

    def go_apart(self) -> None:
        """From now on send on threads of its own: who calls `announce` has no time for a broker that hangs.

        For a process that does not fork.
        """
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="announcing")

    def close(self) -> None:
        """Send nothing more; a worker's sweep finds the jobs whose messages were not sent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def announce(self, groups: Groups) -> bool:
        """Send. If the broker does not answer, leave the jobs to a worker's sweep, warn, return False.

        On threads of its own it returns True at once: the jobs are committed, and messages can be sent again.
        """
        if self._threads is None:
            return self._announce(groups)
        if not self._free.acquire(blocking=False):
            self._leave([job_id for job_ids in groups.values() for job_id in job_ids])
            return False
        try:
            sending = self._threads.submit(self._announce, groups)
        except RuntimeError:  # the process ends
            self._free.release()
            return False
        sending.add_done_callback(lambda _: self._free.release())
        return True

    def _leave(self, job_ids: Sequence[str]) -> None:
        """Have a worker's sweep send the messages of these jobs, soon."""
        with suppress(DatabaseError):  # then it finds them by their age
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
    """The stack level for a warning, given where this is called, that points out of this package."""
    frame, level = inspect.currentframe(), 0
    ours = __name__.partition(".")[0] + "."
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
