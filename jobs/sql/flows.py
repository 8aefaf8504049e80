"""The flows of a queue in SQL: which have rows without a message, and messages for them by their shares.

A queue is that of a model and a priority. See `jobs.base.shares` for what a flow gets. Whoever claims rows
looks for more of them soon after (the worker's housekeeper), and so does each sweep. Nothing is lost if all
of them die: rows without a message are queued rows, and a row whose message got lost is found by its age.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    and_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from nightmill.jobs.base.shares import QUEUE_MESSAGES, Standing, grants, room
from nightmill.jobs.reply.batch_status import MOST_COUNTED
from nightmill.jobs.request.fields import HIGHEST_PRIORITY
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_batches import BATCH_PREFIX
from nightmill.jobs.sql.http_tables import HttpBatchRow
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import QUEUED, JobRow
from nightmill.jobs.sql.types import UtcDateTime

_SORTING = ("enable_sort", "enable_incremental_sort", "enable_bitmapscan", "enable_seqscan")
_MOST_OWNERS = 10_000  # batches whose owners are remembered


class Flow(NamedTuple):
    """The rows of a batch, or the jobs without a batch of an owner (None: of nobody)."""

    batch: str | None
    owner: str | None

    def conditions(self) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions for its rows, of which each is served by one index."""
        if self.batch is not None:
            return (JobRow.batch == self.batch,)
        of_owner = JobRow.owner.is_(None) if self.owner is None else JobRow.owner == self.owner
        return (JobRow.batch.is_(None), of_owner)


class Announcement(NamedTuple):
    """Queued jobs that need a message."""

    model: str | None
    priority: int
    job_ids: list[str]


def of_queue(model: str | None, priority: int) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for queued jobs of a queue."""
    of_model = JobRow.model.is_(None) if model is None else JobRow.model == model
    return (QUEUED, of_model, JobRow.priority == priority)


class Flows:
    """Gives the flows of queues their messages.

    shares  weights of owners
    """

    def __init__(self, database: Database, shares: Mapping[str, int]) -> None:
        self._database = database
        self._shares = shares
        self._owners: OrderedDict[str, str | None] = OrderedDict()

    def top_up(self, models: Iterable[str | None], shard_size: int) -> list[Announcement]:
        """Take due rows without a message, as many as the windows of their flows have room for, and mark them
        as sent; returns one message after the other, the most urgent first."""
        found: list[Announcement] = []
        for priority in self._priorities():
            for model in models:
                found += self._top_up(model, priority, shard_size)
        return found

    def _priorities(self) -> list[int]:
        """Return the priorities of rows without a message, highest first, but for interactive jobs."""
        with self._database.read() as connection:
            return [int(priority) for priority in connection.execute(_unsent_priorities()).scalars()]

    @retried
    def _top_up(self, model: str | None, priority: int, shard_size: int) -> list[Announcement]:
        now, taken = self._database.now(), list[Announcement]()
        with self._database.write() as connection:
            if not self._our_turn(connection, model, priority):
                return []
            flows, standings = self._standings(connection, model, priority, now)
            given = grants(standings, self._shares, shard_size)
            rows: Counter[int] = Counter()
            for grant in given:
                rows[grant.flow] += grant.rows
            found = {
                place: iter(_due_rows(connection, model, priority, flows[place], most, now))
                for place, most in rows.items()
            }
            for grant in given:
                if ids := list(islice(found[grant.flow], grant.rows)):
                    taken.append(Announcement(model, priority, ids))
            for chunk in chunked(job_id for message in taken for job_id in message.job_ids):
                connection.execute(_MARK_SENT, {"job_ids": chunk, "now": now})
        return taken

    def _our_turn(self, connection: Connection, model: str | None, priority: int) -> bool:
        """Return False if another worker fills this queue just now; two would give it twice as much.

        In this transaction PostgreSQL is to take rows in the order of an index: where its statistics are old,
        it takes a queue of 100,000 rows for a few, and would sort them all.
        """
        if self._database.is_sqlite:  # which has one writer at a time
            return True
        key = crc32(f"{model!r} {priority}".encode()) | 1 << 40
        return bool(connection.execute(_TURN, {"key": key}).one()[0])

    def _standings(
        self, connection: Connection, model: str | None, priority: int, now: datetime
    ) -> tuple[list[Flow], list[Standing]]:
        """Return the flows that have rows in the queue or are to have some."""
        given = {"priority": priority, "now": now} | ({} if model is None else {"model": model})
        rows = connection.execute(_announced(model is None), given)
        announced = {Flow(row.batch, row.of_owner): row.rows for row in rows}
        found = connection.execute(_waiting("batch", model is None), given).scalars()
        waiting = {Flow(name, None) for name in found}
        found = connection.execute(_waiting("owner", model is None), given).scalars()
        waiting |= {Flow(None, name) for name in found}
        if connection.execute(_nobody_waits(model is None), given).scalar_one():
            waiting.add(Flow(None, None))
        flows = sorted(announced.keys() | waiting, key=lambda flow: (flow.batch or "", flow.owner or ""))
        owners = self._owners_of(connection, [flow.batch for flow in flows if flow.batch is not None])
        return flows, [
            Standing(
                flow.owner if flow.batch is None else owners.get(flow.batch),
                announced.get(flow, 0),
                flow in waiting,
            )
            for flow in flows
        ]

    def _owners_of(self, connection: Connection, batches: Sequence[str]) -> Mapping[str, str | None]:
        """Return the owners of batches that came over HTTP."""
        over_http = [name for name in batches if name.startswith(BATCH_PREFIX)]
        for chunk in chunked(name for name in over_http if name not in self._owners):
            ids = [name.removeprefix(BATCH_PREFIX) for name in chunk]
            query = select(HttpBatchRow.id, HttpBatchRow.owner).where(HttpBatchRow.id.in_(ids))
            self._owners |= {BATCH_PREFIX + row.id: row.owner for row in connection.execute(query)}
        while len(self._owners) > _MOST_OWNERS + len(over_http):
            self._owners.popitem(last=False)
        return self._owners


def _due(row: Any, now: datetime) -> ColumnElement[bool]:
    return or_(row.scheduled_at.is_(None), row.scheduled_at <= now)


# Statements are built once: with their subqueries, building takes longer than executing them.
_NOW = bindparam("now", type_=UtcDateTime())


def _of_given_queue(any_model: bool, row: Any = JobRow) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for queued jobs of the queue in the parameters `model` and `priority`."""
    queued = QUEUED if row is JobRow else row.state == literal("queued", literal_execute=True)
    of_model = row.model.is_(None) if any_model else row.model == bindparam("model")
    return (queued, of_model, row.priority == bindparam("priority"))


_TURN = select(
    func.pg_try_advisory_xact_lock(bindparam("key", type_=BigInteger())),
    *(func.set_config(name, "off", True) for name in _SORTING),
)


@cache
def _unsent_priorities() -> Any:
    """Return a query for the priorities of rows without a message, highest first; not of interactive ones."""
    unsent = (QUEUED, JobRow.sent_at.is_(None))
    first = select(func.max(JobRow.priority).label("priority"))
    found = first.where(*unsent, JobRow.priority <= HIGHEST_PRIORITY).cte("found", recursive=True)
    row = aliased(JobRow)
    below = select(func.max(row.priority)).where(
        row.state == literal("queued", literal_execute=True),
        row.sent_at.is_(None),
        row.priority < found.c.priority,
    )
    found = found.union_all(select(below.scalar_subquery()).where(found.c.priority.is_not(None)))
    return select(found.c.priority).where(found.c.priority.is_not(None))


@cache
def _announced(any_model: bool) -> Any:
    """Return a query for the flows that have rows in messages, with the number of these."""
    of_owner = case((JobRow.batch.is_(None), JobRow.owner)).label("of_owner")
    counted = select(JobRow.batch, of_owner, func.count().label("rows"))
    counted = counted.where(*_of_given_queue(any_model), JobRow.sent_at.is_not(None))
    return counted.group_by(JobRow.batch, "of_owner")


@cache
def _waiting(column: str, any_model: bool) -> Any:
    """Return a query for the flows with a name in a column that have due rows without a message: a look into
    the index for each of them, however many rows it has."""
    row = aliased(JobRow)
    names, later = getattr(JobRow, column), getattr(row, column)
    batchless = () if column == "batch" else (JobRow.batch.is_(None),)
    without = () if column == "batch" else (row.batch.is_(None),)
    first = select(func.min(names).label("name"))
    first = first.where(*_of_given_queue(any_model), names.is_not(None), *batchless)
    found = first.cte("found", recursive=True)
    following = select(func.min(later))
    following = following.where(*_of_given_queue(any_model, row), later > found.c.name, *without)
    found = found.union_all(select(following.scalar_subquery()).where(found.c.name.is_not(None)))
    waits = _waits(any_model, names, (names == found.c.name, *batchless))
    return select(found.c.name).where(found.c.name.is_not(None), waits)


@cache
def _nobody_waits(any_model: bool) -> Any:
    """Return a query for whether jobs without batch and owner wait."""
    return select(_waits(any_model, JobRow.owner, Flow(None, None).conditions()))


def _waits(
    any_model: bool, names: InstrumentedAttribute[Any], of_flow: Sequence[ColumnElement[bool]]
) -> ColumnElement[bool]:
    """Return the condition that a flow has due rows without a message.

    It asks for the first of them, since PostgreSQL would collect those of all flows for EXISTS.
    """
    firsts = (
        select(JobRow.id)
        .where(*_of_given_queue(any_model), *of_flow, JobRow.sent_at.is_(None), due)
        .order_by(*_as_in_index(names))
        .limit(1)
        .scalar_subquery()
        for due in (JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= _NOW)
    )
    return or_(*(first.is_not(None) for first in firsts))


def _as_in_index(names: InstrumentedAttribute[Any]) -> tuple[Any, ...]:
    """Return the order of an index over flows, in which no other index has rows."""
    return (JobRow.model, JobRow.priority, names, JobRow.sent_at, JobRow.scheduled_at, JobRow.id)


def _due_rows(
    connection: Connection, model: str | None, priority: int, flow: Flow, limit: int, now: datetime
) -> list[str]:
    """Return a flow's first due rows without a message, locked. Suspects get none."""
    ids: list[str] = []
    names = JobRow.owner if flow.batch is None else JobRow.batch
    for due in (JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= now):
        if len(ids) < limit:
            query = select(JobRow.id).where(
                *of_queue(model, priority),
                *flow.conditions(),
                *(JobRow.sent_at.is_(None), JobRow.suspects.is_(None), due),
            )
            query = query.order_by(*_as_in_index(names)).limit(limit - len(ids))
            ids += connection.execute(query.with_for_update(skip_locked=True)).scalars()
    return ids


_MARK_SENT = update(JobRow).where(among(JobRow.id, "job_ids")).values(sent_at=_NOW)


# -- for those who enqueue ---------------------------------------------------------------------------


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
            sent = (*of_queue(model, priority), JobRow.sent_at.is_not(None))
            most = QUEUE_MESSAGES * shard_size
            counts = (
                connection.execute(_counting(conditions, most)).scalar_one()
                for conditions in ((*sent, *flow.conditions()), sent)
            )
            for row in announcing[room(next(counts), next(counts), shard_size) :]:
                row["sent_at"] = None


def _counting(conditions: Sequence[ColumnElement[bool]], most: int) -> Any:
    some = select(true().label("one")).where(*conditions).limit(most).subquery()
    return select(func.count()).select_from(some)


def rows_before(database: Database, batch: str) -> int | None:
    """Return how many queued rows are served before the next row of a batch, up to MOST_COUNTED; None if the
    batch has no due rows in a queue.

    Counted are rows of higher priority, and those of the same queue whose message was sent before: what
    others have besides comes in turn with the batch's.
    """
    now = database.now()
    due = (JobRow.batch == batch, QUEUED, _due(JobRow, now))
    first = select(JobRow.model, JobRow.priority).where(*due).order_by(JobRow.priority.desc()).limit(1)
    with database.read() as connection:
        queue = connection.execute(first).one_or_none()
        if queue is None:
            return None
        of_batch = (*of_queue(queue.model, queue.priority), JobRow.batch == batch)
        next_one = select(func.min(JobRow.sent_at)).where(*of_batch, JobRow.sent_at.is_not(None))
        sent_at = connection.execute(next_one).scalar_one()
        earlier = [] if sent_at is None else [JobRow.sent_at < sent_at]
        others = or_(JobRow.batch.is_(None), JobRow.batch != batch)
        sent = (*of_queue(queue.model, queue.priority), JobRow.sent_at.is_not(None), *earlier, others)
        before = connection.execute(_counting(sent, MOST_COUNTED)).scalar_one()
        of_model = JobRow.model.is_(None) if queue.model is None else JobRow.model == queue.model
        for priority in range(queue.priority + 1, HIGHEST_PRIORITY + 1):
            more = (QUEUED, of_model, JobRow.priority == priority, others, _due(JobRow, now))
            before += connection.execute(_counting([and_(*more)], MOST_COUNTED)).scalar_one()
    return min(int(before), MOST_COUNTED)
