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
    Integer,
    Select,
    String,
    bindparam,
    case,
    cast,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from nightmill.jobs.base.shares import Standing, grants
from nightmill.jobs.request.fields import HIGHEST_PRIORITY
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.hints import by_index
from nightmill.jobs.sql.http_batches import BATCH_PREFIX
from nightmill.jobs.sql.http_tables import HttpBatchRow
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import QUEUED, JobRow
from nightmill.jobs.sql.types import UtcDateTime

_SORTING = ("enable_sort", "enable_incremental_sort", "enable_bitmapscan", "enable_seqscan")
_OF_BATCHES, _OF_OWNERS = "ix_jobs_flows_of_batches", "ix_jobs_flows_of_owners"
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

    @property
    def by(self) -> str:
        """The name of that index, for `by_index`."""
        return _OF_OWNERS if self.batch is None else _OF_BATCHES


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
        queues = tuple(models)
        return [
            announcement
            for priority in self._priorities()
            for announcement in self._top_up(queues, priority, shard_size)
        ]

    def _priorities(self) -> list[int]:
        """Return the priorities of rows without a message, highest first, but for interactive jobs."""
        with self._database.read() as connection:
            return [int(priority) for priority in connection.execute(_unsent_priorities()).scalars()]

    @retried
    def _top_up(self, models: Sequence[str | None], priority: int, shard_size: int) -> list[Announcement]:
        now, taken = self._database.now(), list[Announcement]()
        with self._database.write() as connection:
            models = self._our_turn(connection, models, priority)
            if not models:
                return []
            for model, (flows, standings) in self._standings(connection, models, priority, now).items():
                given = grants(standings, self._shares, shard_size)
                rows: Counter[int] = Counter()
                for grant in given:
                    rows[grant.flow] += grant.rows
                found = {
                    place: iter(self._take(connection, model, priority, flows[place], most, now))
                    for place, most in rows.items()
                }
                for grant in given:
                    if ids := list(islice(found[grant.flow], grant.rows)):
                        taken.append(Announcement(model, priority, ids))
        return taken

    def _our_turn(
        self, connection: Connection, models: Sequence[str | None], priority: int
    ) -> Sequence[str | None]:
        """Return the models whose queues no other worker fills just now; two would give them twice as much.

        In this transaction PostgreSQL is to take rows in the order of an index: where its statistics are old,
        it takes a queue of 100,000 rows for a few, and would sort them all.
        """
        if self._database.is_sqlite:  # which has one writer at a time
            return models
        keys = {
            _key(place): crc32(f"{model!r} {priority}".encode()) | 1 << 40
            for place, model in enumerate(models)
        }
        ours = connection.execute(_turn(len(models)), keys).one()
        return [model for model, free in zip(models, ours, strict=False) if free]

    def _standings(
        self, connection: Connection, models: Sequence[str | None], priority: int, now: datetime
    ) -> dict[str | None, tuple[list[Flow], list[Standing]]]:
        """Return the flows of each model's queue that have rows in it or are to have some."""
        given: dict[str, Any] = {"queue_priority": priority, "now": now}
        given |= {_name(place): model for place, model in enumerate(models) if model is not None}
        announced: list[dict[Flow, int]] = [{} for _ in models]
        waiting: list[set[Flow]] = [set() for _ in models]
        for row in connection.execute(_flows_of(tuple(model is None for model in models)), given):
            if row.sent is None:
                waiting[row.place].add(Flow(row.batch, row.of_owner))
            else:
                announced[row.place][Flow(row.batch, row.of_owner)] = row.sent
        batches = {flow.batch for flows in (*announced, *waiting) for flow in flows if flow.batch is not None}
        owners = self._owners_of(connection, sorted(batches))
        found = {}
        for model, sent, waits in zip(models, announced, waiting, strict=True):
            flows = sorted(sent.keys() | waits, key=lambda flow: (flow.batch or "", flow.owner or ""))
            found[model] = (
                flows,
                [
                    Standing(
                        flow.owner if flow.batch is None else owners.get(flow.batch),
                        sent.get(flow, 0),
                        flow in waits,
                    )
                    for flow in flows
                ],
            )
        return found

    def _take(
        self, connection: Connection, model: str | None, priority: int, flow: Flow, limit: int, now: datetime
    ) -> list[str]:
        """Mark a flow's first due rows without a message as sent; returns their ids."""
        ids: list[str] = []
        queue, at_once = _Queue(0, model is None), not self._database.is_sqlite
        shape = Flow(*(name and "" for name in flow))
        given: dict[str, Any] = {"queue_priority": priority, "now": now, "name": flow.batch or flow.owner}
        given |= {} if model is None else {_name(0): model}
        for scheduled in (False, True):
            if len(ids) < limit:
                query = _taking(queue, shape, scheduled=scheduled, marks=at_once)
                found = connection.execute(query, given | {"most": limit - len(ids)}).scalar_one()
                ids += found.split(",") if found else []
        if not at_once:
            for chunk in chunked(ids):
                connection.execute(_MARK_SENT, {"job_ids": chunk, "now": now})
        return ids

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


# Statements are built once: with their subqueries, building takes longer than executing them.
_NOW = bindparam("now", type_=UtcDateTime())


def _name(place: int) -> str:
    """Return the name of the parameter with the model at a place."""
    return f"model_{place}"


def _key(place: int) -> str:
    """Return the name of the parameter with the key of the queue at a place."""
    return f"key_{place}"


class _Queue(NamedTuple):
    """The queue of the model at a place in the parameters, and of the parameter `queue_priority`.

    any_model  there it is None: of jobs for any model
    """

    place: int
    any_model: bool

    def conditions(self, row: Any = JobRow) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions for its queued jobs."""
        queued = row.state == literal_column("'queued'")  # as in the conditions of indexes
        of_model = row.model.is_(None) if self.any_model else row.model == bindparam(_name(self.place))
        return (queued, of_model, row.priority == bindparam("queue_priority"))


@cache
def _turn(queues: int) -> Any:
    """Return a query that takes the locks of so many queues, and says which it got."""
    return select(
        *(
            func.pg_try_advisory_xact_lock(bindparam(_key(place), type_=BigInteger())).label(f"got_{place}")
            for place in range(queues)
        ),
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
def _flows_of(any_models: tuple[bool, ...]) -> Any:
    """Return one query for the flows of queues: `sent` is how many rows they have in messages, or None of
    those that have due rows without a message.

    any_models  whether the model at each place of the parameters is None
    """
    queues = [_Queue(place, any_model) for place, any_model in enumerate(any_models)]
    return union_all(
        *(
            part
            for queue in queues
            for part in (
                _announced(queue),
                _waiting("batch", queue),
                _waiting("owner", queue),
                _nobody(queue),
            )
        )
    )


def _announced(queue: _Queue) -> Select[Any]:
    """Return a query for the flows that have rows in messages, with the number of these."""
    of_owner = case((JobRow.batch.is_(None), JobRow.owner)).label("of_owner")
    counted = select(_place(queue), JobRow.batch, of_owner, func.count().label("sent"))
    counted = counted.where(*queue.conditions(), JobRow.sent_at.is_not(None))
    return counted.group_by(JobRow.batch, of_owner)


def _waiting(column: str, queue: _Queue) -> Select[Any]:
    """Return a query for the flows with a name in a column that have due rows without a message: a look into
    the index for each of them, however many rows it has."""
    row = aliased(JobRow)
    names, later = getattr(JobRow, column), getattr(row, column)
    batchless = () if column == "batch" else (JobRow.batch.is_(None),)
    without = () if column == "batch" else (row.batch.is_(None),)
    first = select(func.min(names).label("name"))
    first = first.where(*queue.conditions(), names.is_not(None), *batchless)
    found = first.cte(f"{column}_{queue.place}", recursive=True)
    following = select(func.min(later))
    following = following.where(*queue.conditions(row), later > found.c.name, *without)
    found = found.union_all(select(following.scalar_subquery()).where(found.c.name.is_not(None)))
    waits = _waits(queue, names, (names == found.c.name, *batchless))
    both = (found.c.name, _NO_NAME) if column == "batch" else (_NO_NAME, found.c.name)
    return select(_place(queue), *both, _UNSENT).where(found.c.name.is_not(None), waits)


def _nobody(queue: _Queue) -> Select[Any]:
    """Return a query for the flow of jobs without batch and owner, if it has due rows without a message."""
    waits = _waits(queue, JobRow.owner, Flow(None, None).conditions())
    return select(_place(queue), _NO_NAME, _NO_NAME, _UNSENT).where(waits)


def _place(queue: _Queue) -> Any:
    return literal_column(str(queue.place), Integer()).label("place")


_NO_NAME, _UNSENT = cast(null(), String()), cast(null(), Integer())


def _waits(
    queue: _Queue, names: InstrumentedAttribute[Any], of_flow: Sequence[ColumnElement[bool]]
) -> ColumnElement[bool]:
    """Return the condition that a flow has due rows without a message.

    It asks for the first of them, since PostgreSQL would collect those of all flows for EXISTS.
    """
    firsts = (
        select(JobRow.id)
        .where(*queue.conditions(), *of_flow, JobRow.sent_at.is_(None), due)
        .order_by(*_as_in_index(names))
        .limit(1)
        .scalar_subquery()
        for due in (JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= _NOW)
    )
    return or_(*(first.is_not(None) for first in firsts))


def _as_in_index(names: InstrumentedAttribute[Any]) -> tuple[Any, ...]:
    """Return the order of an index over flows, in which no other index has rows."""
    return (JobRow.model, JobRow.priority, names, JobRow.sent_at, JobRow.scheduled_at, JobRow.id)


@cache
def _taking(queue: _Queue, flow: Flow, *, scheduled: bool, marks: bool) -> Select[Any]:
    """Return a query for a flow's first due rows without a message, as one text with commas; locked.

    Suspects get none. One text, since to read a row for each id takes longer than all else.

    flow       has "" for the name in the parameter `name`
    scheduled  rows that were due at a time, else those that are due at once
    marks      it marks them as sent, too, as PostgreSQL can in one statement
    """
    names = JobRow.owner if flow.batch is None else JobRow.batch
    named = (names.is_(None) if flow.owner is None else names == bindparam("name"),)
    of_flow = (JobRow.batch.is_(None), *named) if flow.batch is None else (names == bindparam("name"),)
    due = JobRow.scheduled_at <= _NOW if scheduled else JobRow.scheduled_at.is_(None)
    first = select(JobRow.id).where(
        *queue.conditions(), *of_flow, JobRow.sent_at.is_(None), JobRow.suspects.is_(None), due
    )
    first = first.order_by(*_as_in_index(names)).limit(bindparam("most", type_=Integer()))
    first = by_index(first, JobRow, flow.by)
    some = first.with_for_update(skip_locked=True).cte("some")
    if not marks:
        return select(func.group_concat(some.c.id, literal_column("','")))
    found: Select[Any] = select(func.string_agg(some.c.id, literal_column("','")))
    marking = update(JobRow).where(JobRow.id == some.c.id).values(sent_at=_NOW)
    return found.add_cte(marking.returning(JobRow.id).cte("marked"))


_MARK_SENT = update(JobRow).where(among(JobRow.id, "job_ids")).values(sent_at=_NOW)
