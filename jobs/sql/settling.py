"""Times that lie in the future after the clock was set back: they are made to be now, at first sight.

A time at which something happened (a heartbeat, the sending of a message) counts as fresh until so much time
has gone by. Once the database's clock is set back by an hour, what happened just before lies an hour ahead:
a worker that died then would count as alive for that hour, and a message that was lost then as on its way.
Such a time says nothing but that it was before this moment. So whoever comes by it writes down this moment
instead; who is alive says so again in time.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, select, update

from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import JobRow, WorkerRow

AHEAD = timedelta(seconds=5)
"""How far ahead a time may lie: each process counts on from when it read the database's clock."""
_GROUP = 1024


@retried
def settle_heartbeats(database: Database) -> None:
    """Heartbeats that lie ahead, of whatever worker, were at this moment."""
    ahead = WorkerRow.heartbeat_at > database.clock_time(ago=-AHEAD)
    with database.read() as connection:
        if connection.execute(select(WorkerRow.id).where(ahead).limit(1)).first() is None:
            return
    with database.write() as connection:
        connection.execute(update(WorkerRow).where(ahead).values(heartbeat_at=database.clock_time()))


def settle_sendings(database: Database, connection: Connection, *conditions: Any) -> None:
    """Messages of the jobs that fit, in groups, were sent at this moment if their time lies ahead."""
    ahead = JobRow.sent_at > database.clock_time(ago=-AHEAD)
    query = select(JobRow.id).where(*conditions, ahead).order_by(JobRow.sent_at, JobRow.id).limit(_GROUP)
    if found := connection.execute(query.with_for_update(skip_locked=True)).scalars().all():
        connection.execute(update(JobRow).where(JobRow.id.in_(found)).values(sent_at=database.clock_time()))
