"""Queries for web pages: counts of a period, speed by minute, and the rows of a batch in pages.

Every query reads only an index or a bounded number of rows, however many jobs there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Integer, String, cast, func, or_, select

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.tables import QUEUED, RUNNING, JobRow

ROWS_AT_ONCE = 50
"""Rows of a page."""
SEARCHED_AT_ONCE = 20_000
"""Most rows searched for matches of a page; then the user decides whether to continue."""
_FEW = 5_000  # up to so many matching rows are sorted, more are searched in order
_SHOWN = 160  # characters of a text shown in a list


@dataclass(frozen=True, slots=True)
class Minute:
    """Rows and tokens finished within a minute."""

    begin: datetime
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter for rows of a batch; None: any."""

    state: JobState | None = None
    reason: StopReason | None = None
    custom_id: str | None = None  # prefix
    text: str | None = None  # substring of the answer or error


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row of a batch in a list."""

    id: str
    row: int | None
    custom_id: str | None
    state: JobState
    stop_reason: StopReason | None
    prompt_tokens: int | None
    completion_tokens: int | None
    text: str | None  # its beginning
    error: str | None  # its beginning
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class RowPage:
    """A page of rows. `after` is the start of the next page, None at the end; with `searched` False, the next
    page may be empty."""

    lines: list[RowSummary]
    after: str | None
    searched: bool


class DashboardQueries:
    """Queries for web pages."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def now(self) -> datetime:
        """Return the database's time."""
        return self._database.now()

    def waiting(self) -> dict[str, int]:
        """Count queued and running jobs."""
        with self._database.read() as connection:

            def count(*conditions: Any) -> int:
                return connection.execute(
                    select(func.count()).select_from(JobRow).where(*conditions)
                ).scalar_one()

            # Each condition has a partial index of its own; there is none for all queued rows.
            queued = count(QUEUED, JobRow.sent_at.is_(None)) + count(QUEUED, JobRow.sent_at.is_not(None))
            return {"queued": queued, "running": count(RUNNING)}

    def ended(self, since: datetime) -> dict[JobState, int]:
        """Count jobs that ended since then, by state."""
        query = (
            select(JobRow.state, func.count())
            .where(JobRow.finished_at.is_not(None), JobRow.finished_at >= since)
            .group_by(JobRow.state)
        )
        with self._database.read() as connection:
            return {JobState.read(state): rows for state, rows in connection.execute(query)}

    def minutes(self, since: datetime, until: datetime, every: timedelta) -> list[Minute]:
        """Return the rows and tokens finished in each `every` from `since` to `until`, including empty
        intervals."""
        epoch: Any = (
            func.unixepoch(JobRow.finished_at, type_=Integer)
            if self._database.is_sqlite
            else cast(func.floor(func.extract("epoch", JobRow.finished_at)), Integer)
        )
        place = (epoch - int(since.timestamp())) // int(every.total_seconds())
        query = (
            select(place.label("place"), func.count(), func.coalesce(func.sum(JobRow.completion_tokens), 0))
            .where(JobRow.finished_at.is_not(None), JobRow.finished_at >= since, JobRow.finished_at < until)
            .group_by("place")
        )
        with self._database.read() as connection:
            found = {int(at): (rows, int(tokens)) for at, rows, tokens in connection.execute(query)}
        return [
            Minute(since + every * at, *found.get(at, (0, 0))) for at in range(int((until - since) / every))
        ]

    def lines(self, batch: str, wanted: RowFilter, after: str | None, few: int) -> RowPage:
        """Return a page of matching rows of a batch, in the order of entering.

        after  id of the last row of the previous page
        few    number of rows with the wanted state and stop reason
        """
        conditions = _conditions(wanted)
        order: Any = JobRow.id
        if not conditions or few <= _FEW:
            if conditions:
                # Few rows are found by their state and then sorted; searching in order would read all rows.
                rows, order = _of(batch, after, *conditions), JobRow.id.concat("")
            else:
                # Ids come from the batch's index alone. For whole rows, PostgreSQL would walk the table from
                # its first job on, through all earlier batches.
                first = select(JobRow.id).where(*_of(batch, after)).order_by(JobRow.id)
                rows = [JobRow.id.in_(first.limit(ROWS_AT_ONCE + 1))]
            lines = self._page(rows, ROWS_AT_ONCE + 1, order)
            more = len(lines) > ROWS_AT_ONCE
            return RowPage(lines[:ROWS_AT_ONCE], lines[ROWS_AT_ONCE - 1].id if more else None, searched=True)
        ids = select(JobRow.id).where(*_of(batch, after)).order_by(JobRow.id).limit(SEARCHED_AT_ONCE)
        found = ids.subquery().c.id
        with self._database.read() as connection:
            first_id, last = connection.execute(select(func.min(found), func.max(found))).one()
        if last is None:
            return RowPage([], None, searched=True)
        searched = [JobRow.batch == batch, JobRow.id.between(first_id, last), *conditions]
        lines = self._page(searched, ROWS_AT_ONCE + 1)
        if len(lines) > ROWS_AT_ONCE:
            return RowPage(lines[:ROWS_AT_ONCE], lines[ROWS_AT_ONCE - 1].id, searched=True)
        with self._database.read() as connection:
            query = select(JobRow.id).where(*_of(batch, last)).limit(1)
            more = connection.execute(query).one_or_none() is not None
        return RowPage(lines, last if more else None, searched=False)

    def _page(self, conditions: Sequence[Any], limit: int, order: Any = JobRow.id) -> list[RowSummary]:
        query = (
            select(
                JobRow.id,
                JobRow.row,
                JobRow.custom_id,
                JobRow.state,
                JobRow.stop_reason,
                JobRow.prompt_tokens,
                JobRow.completion_tokens,
                func.substr(JobRow.text, 1, _SHOWN),
                func.substr(JobRow.error, 1, _SHOWN),
                JobRow.finished_at,
            )
            .where(*conditions)
            .order_by(order)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [
                RowSummary(
                    job_id,
                    row,
                    custom_id,
                    JobState.read(state),
                    None if reason is None else StopReason.read(reason),
                    *rest,
                )
                for job_id, row, custom_id, state, reason, *rest in connection.execute(query)
            ]


def _of(batch: str, after: str | None, *conditions: Any) -> list[Any]:
    beyond = [] if after is None else [JobRow.id > after]
    return [JobRow.batch == batch, *beyond, *conditions]


def _conditions(wanted: RowFilter) -> list[Any]:
    found: list[Any] = []
    if wanted.state is not None:
        found.append(JobRow.state == str(wanted.state))
    if wanted.reason is not None:
        found.append(JobRow.stop_reason == str(wanted.reason))
    if wanted.custom_id is not None:
        found.append(cast(JobRow.custom_id, String).startswith(wanted.custom_id, autoescape=True))
    if wanted.text is not None:
        inside = [
            cast(column, String).contains(wanted.text, autoescape=True)
            for column in (JobRow.text, JobRow.error)
        ]
        found.append(or_(*inside))
    return found
