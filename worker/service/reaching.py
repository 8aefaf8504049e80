"""Reaching database and broker when a worker's process starts.

A worker that is started ends with an error if one of them is away: the URL may be wrong, and a supervisor
starts it again. One that wakes, or loads another model, has reached both before. It waits, as it does
while it serves.
"""

import logging
import time

from nightmill.jobs.errors import BrokerError, DatabaseUnreachableError
from nightmill.jobs.messages.broker import Broker, is_forbidden
from nightmill.jobs.sql.database import Database
from nightmill.worker.service import celery_flags

log = logging.getLogger("nightmill.worker")

_LOOK_SECONDS = 1.0


def reach_broker(broker: Broker, *, woken: bool) -> None:
    """Raise BrokerError if the broker does not answer or forbids what a worker does, unless it was woken.

    Celery's consumer, and all else that needs the broker, tries again by itself. So a worker starts with one
    that is full or read-only.
    """
    if woken:
        return
    broker.ping()
    try:
        broker.try_writing(worker=True)
    except BrokerError as error:
        if is_forbidden(error):
            raise
        log.warning("%s", error)


def reach_database(database: Database, *, woken: bool) -> None:
    """Check the schema; a worker that was woken waits for a database that is away.

    Raises DatabaseError, and SystemExit if a signal ends the process meanwhile.
    """
    complaint = ""
    while True:
        try:
            database.ensure_schema()
        except DatabaseUnreachableError as error:
            if not woken:
                raise
            if str(error) != complaint:  # once, not each second
                complaint = str(error)
                log.warning("%s", error)
        else:
            return
        celery_flags.exit_if_told()
        time.sleep(_LOOK_SECONDS)
