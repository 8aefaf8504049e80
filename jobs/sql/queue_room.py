"""Room in a queue for those who enqueue: rows that may have messages at once, and rows that come before."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, true

from nightmill.jobs.base.shares import QUEUE_MESSAGES, room
from nightmill.jobs.reply.batch_status import MOST_COUNTED
from nightmill.jobs.request.fields import HIGHEST_PRIORITY
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.flows import Flow, of_queue
from nightmill.jobs.sql.hints import by_index
from nightmill.jobs.sql.tables import QUEUED, JobRow

_SENT, _UNSENT = "ix_jobs_waiting", "ix_jobs_unsent"
_EVER = datetime(1970, 1, 1, tzinfo=UTC)  # before any message
# SQLite finds where in an index the rows with a message begin only if it is given a least value.
_HAS_MESSAGE = (JobRow.sent_at.is_not(None), JobRow.sent_at > _EVER)


def leave_room(database: Database, rows: Sequence[dict[str, Any]], shard_size: int) -> None:
    """Leave those of these new rows without a message for which their flows have no room now.

    Workers send their messages in turn. A single row always has its message at once.
    """
    queues: dict[tuple[str | None, int, Flow], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("sent_at") is not None and row["priority"] <= HIGHEST_PRIORITY:
            flow = Flow(row["batch"], None if row["batch"] else row.get("owner"))
            queues.setdefault((row["model"], row["priority"], flow), []).append(row)
    crowded = [(queue, of_queue_) for queue, of_queue_ in queues.items() if len(of_queue_) > 1]
    if not crowded:
        return
    with database.read() as connection:
        for (model, priority, flow), announcing in crowded:
            sent = (*of_queue(model, priority), *_HAS_MESSAGE)
            most = QUEUE_MESSAGES * shard_size
            counts = (
                connection.execute(_counting(conditions, most, index)).scalar_one()
                for conditions, index in (((*sent, *flow.conditions()), flow.by), (sent, _SENT))
            )
            for row in announcing[room(next(counts), next(counts), shard_size) :]:
                row["sent_at"] = None


def _counting(conditions: Sequence[ColumnElement[bool]], most: int, index: str) -> Any:
    some = select(true().label("one")).where(*conditions).limit(most)
    return select(func.count()).select_from(by_index(some, JobRow, index).subquery())


def rows_before(database: Database, batch: str) -> int | None:
    """Return how many queued rows are served before the next row of a batch, up to MOST_COUNTED; None if the
    batch has no due rows in a queue.

    Counted are rows of higher priority, and those of the same queue whose message was sent before: what
    others have besides comes in turn with the batch's.
    """
    now = database.now()
    ready = (JobRow.batch == batch, QUEUED, _due(now))
    first = select(JobRow.model, JobRow.priority).where(*ready).order_by(JobRow.priority.desc()).limit(1)
    with database.read() as connection:
        queue = connection.execute(first).one_or_none()
        if queue is None:
            return None
        of_batch = (*of_queue(queue.model, queue.priority), JobRow.batch == batch)
        next_one = by_index(select(func.min(JobRow.sent_at)), JobRow, Flow(batch, None).by)
        sent_at = connection.execute(next_one.where(*of_batch, *_HAS_MESSAGE)).scalar_one()
        earlier = [] if sent_at is None else [JobRow.sent_at < sent_at]
        others = or_(JobRow.batch.is_(None), JobRow.batch != batch)
        sent = (*of_queue(queue.model, queue.priority), *_HAS_MESSAGE, *earlier, others)
        before = connection.execute(_counting(sent, MOST_COUNTED, _SENT)).scalar_one()
        for priority in range(queue.priority + 1, HIGHEST_PRIORITY + 1):
            more = (*of_queue(queue.model, priority), others, _due(now))
            for with_message, index in ((_HAS_MESSAGE, _SENT), ((JobRow.sent_at.is_(None),), _UNSENT)):
                before += connection.execute(
                    _counting((*more, *with_message), MOST_COUNTED, index)
                ).scalar_one()
    return min(int(before), MOST_COUNTED)


def _due(now: datetime) -> ColumnElement[bool]:
    return or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now)
