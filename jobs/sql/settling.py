"""Correction of timestamps that lie in the future after the clock was set back.

A heartbeat or the sending of a message counts as recent for some time. If the database's clock is set back by
an hour, timestamps from just before lie an hour ahead: a worker that died then would count as alive for that
hour, and a message that was lost then as on its way. Such timestamps are replaced by the current time when
they are first seen; a live worker updates its own in time.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, select, update

from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import JobRow, WorkerRow

AHEAD = timedelta(seconds=5)
"""Tolerated lead of a timestamp, since each process extrapolates the database's clock."""
_GROUP = 1024


@retried
def settle_heartbeats(database: Database) -> None:
    """Replace heartbeats in the future by the current time, for all workers."""
    ahead = WorkerRow.heartbeat_at > database.clock_time(ago=-AHEAD)
    with database.read() as connection:
        if connection.execute(select(WorkerRow.id).where(ahead).limit(1)).first() is None:
            return
    with database.write() as connection:
        connection.execute(update(WorkerRow).where(ahead).values(heartbeat_at=database.clock_time()))


def settle_sendings(database: Database, connection: Connection, *conditions: Any) -> None:
    """Replace sending times in the future by the current time, for matching jobs, in groups."""
    ahead = JobRow.sent_at > database.clock_time(ago=-AHEAD)
    query = select(JobRow.id).where(*conditions, ahead).order_by(JobRow.sent_at, JobRow.id).limit(_GROUP)
    if found := connection.execute(query.with_for_update(skip_locked=True)).scalars().all():
        connection.execute(update(JobRow).where(JobRow.id.in_(found)).values(sent_at=database.clock_time()))
