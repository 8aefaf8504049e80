"""The queries behind the report of a night: what ended between two moments, from `jobs` and `activity`."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.reply.batch_status import ErrorGroup, group_errors
from nightmill.jobs.reply.night import (
    BatchNight,
    ModelNight,
    NightReport,
    Spell,
    loads_of,
    night_of,
    shorter,
    spent_in,
)
from nightmill.jobs.sql.activity import ActivityStore
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import tokens_read
from nightmill.jobs.sql.patience import long_lasting
from nightmill.jobs.sql.tables import JobRow

_MOST_KINDS = 10
_MOST_MESSAGES = 2_000
_RECORDED = ("energy_joules", "gpu_seconds")


class Nights:
    """Reports of nights."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @long_lasting
    def report(self, day: date | None = None) -> NightReport:
        """Return what the night was that began on a day; None: the last one, or the present one."""
        day, since, until = night_of(day, self._database.now().astimezone())
        ended = (JobRow.finished_at.is_not(None), JobRow.finished_at >= since, JobRow.finished_at < until)
        spells = ActivityStore(self._database).between(since, until)
        with self._database.read() as connection:
            models = _models(connection, ended)
            computed = (*ended, JobRow.started_at.is_not(None))
            times = select(func.min(JobRow.started_at), func.max(JobRow.finished_at)).where(*computed)
            began, last = connection.execute(times).one()
            slowest = _slowest(connection, computed)
            failures = _failures(connection, ended)
        began = began if began is None else max(began, since)
        loads, spent = loads_of(spells), spent_in(spells)
        gaps = _gaps(spells, began, last)
        return NightReport(
            date=day,
            since=since,
            until=until,
            began_at=began,
            ended_at=last,
            models=models,
            loads=loads,
            workers=len({spell.worker for spell in spells}),
            spent=spent,
            slowest=slowest,
            failures=failures,
            sentences=shorter(spent | {"messages": gaps}, models, len(loads), gaps) if models else [],
        )


def _models(connection: Connection, ended: Sequence[Any]) -> list[ModelNight]:
    failed = JobRow.state == JobState.FAILED
    tokens = func.coalesce(func.sum(JobRow.completion_tokens), 0)
    query = select(
        JobRow.model,
        func.count().label("rows"),
        func.count(case((failed, 1))).label("failed"),
        tokens_read().label("prompt_tokens"),
        func.coalesce(func.sum(JobRow.cached_tokens), 0).label("cached_tokens"),
        tokens.label("completion_tokens"),
        func.coalesce(func.sum(case((failed, JobRow.completion_tokens))), 0).label("failed_tokens"),
        *(func.sum(getattr(JobRow, name)).label(name) for name in _RECORDED),
    )
    rows = connection.execute(query.where(*ended).group_by(JobRow.model).order_by(tokens.desc()))
    return [
        ModelNight(
            row.model,
            *(int(value or 0) for value in row[1:7]),
            **{name: getattr(row, name) for name in _RECORDED},
        )
        for row in rows
    ]


def _slowest(connection: Connection, computed: Sequence[Any]) -> BatchNight | None:
    """Return the batch that took the longest time."""
    query = (
        select(
            JobRow.batch,
            func.count(),
            func.coalesce(func.sum(JobRow.completion_tokens), 0),
            func.min(JobRow.started_at),
            func.max(JobRow.finished_at),
        )
        .where(JobRow.batch.is_not(None), *computed)
        .group_by(JobRow.batch)
    )
    batches = [
        BatchNight(str(name), rows, int(tokens or 0), began, ended)
        for name, rows, tokens, began, ended in connection.execute(query)
        if began is not None and ended is not None
    ]
    return max(batches, key=lambda batch: (batch.seconds, batch.name), default=None)


def _failures(connection: Connection, ended: Sequence[Any]) -> list[ErrorGroup]:
    message = func.substr(func.coalesce(JobRow.error, JobRow.stop_reason), 1, 300).label("message")
    failed = and_(JobRow.state == JobState.FAILED, JobRow.stop_reason != StopReason.CANCELLED)
    query = select(message, func.count().label("rows")).where(*ended, failed).group_by("message")
    rows = connection.execute(query.order_by(func.count().desc()).limit(_MOST_MESSAGES))
    return group_errors(((row.message, row.rows) for row in rows), _MOST_KINDS)


def _gaps(spells: Sequence[Spell], began: datetime | None, ended: datetime | None) -> float:
    """Return the seconds that workers waited for jobs between the first row of the night and its last."""
    if began is None or ended is None:
        return 0.0
    within = (spell for spell in spells if spell.ended_at > began and spell.began_at < ended)
    return sum(
        min(
            spell.messages,
            (min(spell.ended_at, ended) - max(spell.began_at, began)).total_seconds(),
        )
        for spell in within
    )
