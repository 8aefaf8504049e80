"""Messages for queued jobs. A broker that does not answer delays jobs, and loses none."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress

from nightmill.jobs.errors import BrokerError, DatabaseError, DeliveryDelayedWarning
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import mark_unsent

Groups = Mapping[tuple[str | None, int], Sequence[str]]
"""(model, priority) -> ids of jobs."""


class Announcer:
    """Sends messages for jobs that are committed already."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self._database = database
        self._broker = broker

    def announce(self, groups: Groups) -> bool:
        """Send. If the broker does not answer, leave the jobs to a worker's sweep, warn, return False."""
        delivered = True
        for (model, priority), job_ids in groups.items():
            try:
                self._broker.announce(job_ids, model, priority)
            except BrokerError as error:
                delivered = False
                with suppress(DatabaseError):  # then the sweep finds them by their age
                    mark_unsent(self._database, job_ids)
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
