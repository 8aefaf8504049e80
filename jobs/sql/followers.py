"""Statements about followers: jobs that are held until another has ended, and then take its answer.

Whoever ends a job settles its followers in the same transaction: one whose prior has succeeded gets its
prompt and is due, any other ends with a code of its own, and so do those that follow it. A settled follower
is not held any more, so that nobody can settle it twice; that its prior has ended is read from SQL, so that
a worker which has lost a job settles nothing. What a worker of an older version ends is found by the sweep
(`jobs.sql.sweep`).

Priors are locked before their followers. Where that order of ids crosses another transaction's, the database
ends one of the two, which is tried again.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table, and_, bindparam, case, func, literal, null, or_, select, update

from nightmill.jobs.base.contract import (
    FINAL_STATES,
    HELD_UNTIL,
    MAX_ERROR_LENGTH,
    JobState,
    JsonObject,
    StopReason,
    storable,
)
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.reply.job import Job
from nightmill.jobs.reply.prior import JobBefore
from nightmill.jobs.request.following import Held
from nightmill.jobs.request.reuse import content_key, realm_of
from nightmill.jobs.sql import partials
from nightmill.jobs.sql.hints import by_index
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.snapshots import read_jobs
from nightmill.jobs.sql.tables import HELD, BatchRow, JobRow
from nightmill.jobs.sql.types import UtcDateTime

log = logging.getLogger(__name__)

_JOBS = cast(Table, JobRow.__table__)
_AT_ONCE = 500  # ids in one IN list
_SHOWN_ERROR = 300  # characters of a prior's error that its followers repeat
_SCHEMA_AGE = "a worker of this version does not understand it; upgrade the workers, then retry the row"


class _Ending(NamedTuple):
    """The end of a follower that is never filled."""

    state: JobState
    reason: StopReason
    code: RowCode
    message: str
    field: str | None = None


def ended(connection: Connection, job_ids: Sequence[str], now: datetime) -> list[str]:
    """Do what is due when jobs have ended: their saved tokens go, and their followers are settled.

    Names of jobs that have not ended do no harm. Returns the followers that have their prompt now.
    """
    partials.forget_ended(connection, job_ids)
    return settle(connection, job_ids, now)


def settle(
    connection: Connection, prior_ids: Sequence[str], now: datetime, *, announced: bool = False
) -> list[str]:
    """Fill or end the held followers of those of these jobs that have ended or are gone, and their followers.

    announced  the caller sends messages for what is filled, once this is committed; otherwise a sweep does

    Returns the filled ones that are due.
    """
    filled: list[str] = []
    left = list(prior_ids)
    while left:
        priors, left = left, []
        for chunk in _chunks(priors):
            waiting = connection.execute(_WAITING, {"priors": chunk}).all()
            if not waiting:
                continue
            named = sorted({row.prior for row in waiting})
            found = {job.id: job for job in read_jobs(connection, select(_JOBS).where(JobRow.id.in_(named)))}
            fills: list[dict[str, Any]] = []
            endings: list[dict[str, Any]] = []
            for row in waiting:
                prior = found.get(row.prior)
                if prior is not None and not prior.state.final:
                    continue
                succeeded = prior is not None and prior.state is JobState.SUCCEEDED
                made = _filled(row, prior, now) if prior is not None and succeeded else _ending(prior)
                if isinstance(made, _Ending):
                    endings.append(_end_values(row, made, now))
                else:
                    due = made["new_scheduled_at"] is None
                    fills.append(made | {"new_sent_at": now if announced and due else None})
                    filled += [row.id] if due else []
            if fills:
                connection.execute(_FILL, fills)
            if endings:
                connection.execute(_END, endings)
            left += [values["of_job"] for values in endings]
    return filled


def hold_again(connection: Connection, prior_ids: Sequence[str], now: datetime) -> None:
    """Hold those followers of these jobs again that ended since these did, and their followers.

    The caller has queued the priors again. Followers that somebody cancelled, or whose deadline passed, stay.
    """
    left = list(prior_ids)
    while left:
        priors, left = left, []
        for chunk in _chunks(priors):
            left += connection.execute(_HOLD, {"priors": chunk}).scalars().all()


def lock_priors(connection: Connection, prior_ids: Sequence[str]) -> None:
    """Keep jobs from ending until this transaction does, which is about to add followers of them."""
    if connection.dialect.name == "sqlite":
        return
    for chunk in _chunks(sorted(prior_ids)):
        named = select(JobRow.id).where(JobRow.id.in_(chunk)).order_by(JobRow.id)
        connection.execute(named.with_for_update(read=True))


def queued_again(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an UPDATE that queues jobs again, so that an unfilled follower is held again."""
    held = JobRow.held.is_not(None)
    forever = literal(HELD_UNTIL, UtcDateTime())
    sent = literal(values["sent_at"], UtcDateTime())
    return {
        **values,
        "scheduled_at": case((held, forever), else_=null()),
        "sent_at": case((held, null()), else_=sent),
    }


def count_held(connection: Connection, batch: str) -> int:
    """Return the number of a batch's rows that wait for their priors."""
    query = select(func.count()).select_from(JobRow).where(JobRow.batch == batch, HELD)
    return connection.execute(by_index(query, JobRow, "ix_jobs_held")).scalar_one()


def overlooked(
    connection: Connection, after: tuple[str, str] | None, limit: int
) -> tuple[list[str], tuple[str, str] | None]:
    """Look at a page of held followers behind `after`, (batch, id).

    Returns the priors that have ended or are gone, and where the next page begins; None after the last one.
    """
    page = select(JobRow.batch, JobRow.id, JobRow.prior).where(HELD)
    if after is not None:
        batch, job_id = after
        page = page.where(or_(JobRow.batch > batch, and_(JobRow.batch == batch, JobRow.id > job_id)))
    page_rows = page.order_by(JobRow.batch, JobRow.id).limit(limit).subquery()
    prior = _JOBS.alias("prior")
    rows = connection.execute(
        select(page_rows, prior.c.state)
        .select_from(page_rows.outerjoin(prior, prior.c.id == page_rows.c.prior))
        .order_by(page_rows.c.batch, page_rows.c.id)
    ).all()
    settled = {row.prior for row in rows if row.prior and (row.state is None or row.state in FINAL_STATES)}
    return sorted(settled), (rows[-1].batch, rows[-1].id) if len(rows) == limit else None


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]


def _ending(prior: Job | None) -> _Ending:
    """Say how the followers of a job without a result end."""
    if prior is None:
        said = "the row that it follows has been deleted; submit the rows once more"
        return _Ending(JobState.FAILED, StopReason.ERROR, RowCode.PRIOR_FAILED, said)
    which = prior.custom_id or prior.id
    if prior.state is JobState.CANCELLED:
        said = f"the row that it follows, {which}, was cancelled; retry that one, and this one follows"
        return _Ending(JobState.CANCELLED, StopReason.CANCELLED, RowCode.PRIOR_CANCELLED, said)
    why = f": {prior.error[:_SHOWN_ERROR]}" if prior.error else ""
    said = f"the row that it follows, {which}, failed ({prior.stop_reason}){why}"
    return _Ending(JobState.FAILED, StopReason.ERROR, RowCode.PRIOR_FAILED, said)


def _filled(row: Any, prior: Job, now: datetime) -> dict[str, Any] | _Ending:
    """Return the parameters of `_FILL`, or how the follower ends if its prompt cannot be made."""
    failed = JobState.FAILED, StopReason.ERROR
    try:
        held = Held.read(row.held)
        before = JobBefore(prior)
        content = held.fill(before)
        key = _key(row, held, content)
        meta = row.metadata
        if held.columns:
            late = {column: before.value(name) for column, name in held.columns.items()}
            meta = {**(meta or {}), **{name: value for name, value in late.items() if value is not None}}
    except InvalidRequestError as error:
        return _Ending(*failed, error.code, str(error), error.field)
    except Exception as error:
        log.exception("the prompt of job %s could not be made of its prior's answer", row.id)
        return _Ending(
            *failed, RowCode.INVALID_VALUE, f"held: {type(error).__name__}: {error}; {_SCHEMA_AGE}"
        )
    begins = held.scheduled_at
    return {
        "of_job": row.id,
        "new_prompt": content["prompt"],
        "new_messages": content["messages"],
        "new_key": key,
        "new_metadata": meta,
        "new_scheduled_at": begins if begins is not None and begins > now else None,
    }


def _key(row: Any, held: Held, content: JsonObject) -> str | None:
    seed = row.seed if held.seeded else None
    values = {"prompt_ids": None, "rendering": row.rendering, "constrained": row.constrained} | content
    return content_key(row.reuse, values | {"params": row.params}, seed, held.realm or realm_of(None))


def _end_values(row: Any, ending: _Ending, now: datetime) -> dict[str, Any]:
    message = storable(ending.message, MAX_ERROR_LENGTH)
    entry = {"code": str(ending.code), "field": ending.field, "at": now.isoformat(), "error": message}
    return {
        "of_job": row.id,
        "new_state": ending.state,
        "new_reason": ending.reason,
        "new_error": message,
        "new_errors": [*(row.errors if isinstance(row.errors, list) else []), entry],
        "new_finished_at": now,
    }


# Built once: building a statement takes longer than SQLite takes to execute it.
_NAMED = among(JobRow.prior, "priors")
_WAITING = (
    select(
        *(JobRow.id, JobRow.prior, JobRow.held, JobRow.params, JobRow.constrained, JobRow.rendering),
        *(JobRow.reuse, JobRow.seed, JobRow.errors, _JOBS.c.metadata),
    )
    .where(_NAMED, HELD)
    .order_by(JobRow.id)
    .with_for_update()
)
_GUARDED = update(_JOBS).where(
    _JOBS.c.id == bindparam("of_job"), _JOBS.c.state == JobState.QUEUED, _JOBS.c.held.is_not(None)
)
_FILL = _GUARDED.values(
    prompt=bindparam("new_prompt"),
    messages=bindparam("new_messages", type_=_JOBS.c.messages.type),
    content_key=bindparam("new_key"),
    metadata=bindparam("new_metadata", type_=_JOBS.c.metadata.type),
    held=null(),
    scheduled_at=bindparam("new_scheduled_at"),
    sent_at=bindparam("new_sent_at"),
)
_END = _GUARDED.values(
    state=bindparam("new_state"),
    stop_reason=bindparam("new_reason"),
    error=bindparam("new_error"),
    errors=bindparam("new_errors", type_=_JOBS.c.errors.type),
    finished_at=bindparam("new_finished_at"),
)
_DELETING = select(BatchRow.name).where(BatchRow.deleting_at.is_not(None))
_HOLD = (
    update(JobRow)
    .where(
        _NAMED,
        JobRow.held.is_not(None),
        JobRow.state.in_([JobState.FAILED, JobState.CANCELLED]),
        JobRow.cancel_requested_at.is_(None),
        JobRow.stop_reason != StopReason.DEADLINE,
        or_(JobRow.batch.is_(None), JobRow.batch.not_in(_DELETING)),
    )
    .values(
        state=JobState.QUEUED,
        stop_reason=None,
        error=None,
        finished_at=None,
        sent_at=None,
        scheduled_at=HELD_UNTIL,
    )
    .returning(JobRow.id)
)
