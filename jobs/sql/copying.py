"""Copies of succeeded jobs for verification. The jobs themselves are only read."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, func, select

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.sql import inserting
from nightmill.jobs.sql.claimed import requested_at
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import JOBS, chunked, retried_values
from nightmill.jobs.sql.tables import BATCH_CREATED_AT, JobRow, WorkerRow

COPIED_FROM = "copied_from"
"""Key in a copy's metadata for the id of the original job."""

# A job for any model is copied for the model that computed it, if its worker is known.
_MODEL = func.coalesce(JobRow.model, WorkerRow.model)
_JOBS_AND_WORKERS = JOBS.outerjoin(WorkerRow.__table__, JobRow.worker == WorkerRow.id)


def models_of(database: Database, job_ids: Iterable[str]) -> set[str | None]:
    """Return the models that copies of these jobs need; None: any."""
    models: set[str | None] = set()
    for chunk in chunked(job_ids):
        query = select(_MODEL).select_from(_JOBS_AND_WORKERS).where(JobRow.id.in_(chunk)).distinct()
        with database.read() as connection:
            models.update(connection.execute(query).scalars())
    return models


def copy_jobs(
    database: Database, job_ids: Sequence[str], batch: str, priority: int, ids: IdSource
) -> list[dict[str, Any]]:
    """Queue copies, in `batch`, of those of these jobs that have succeeded; returns the new rows."""
    query = (
        select(JOBS, _MODEL.label("computed_by"), BATCH_CREATED_AT)
        .select_from(_JOBS_AND_WORKERS)
        .where(JobRow.id.in_(job_ids), JobRow.state == JobState.SUCCEEDED)
        .order_by(JobRow.id)
    )
    with database.read() as connection:
        found = connection.execute(query).mappings().all()
    now = database.now()
    rows = [_copy(row, now) | {"id": ids.draw(), "batch": batch, "priority": priority} for row in found]
    if rows:
        inserting.add(rows, database)
    return rows


def _copy(row: RowMapping, now: datetime) -> dict[str, Any]:
    """Copy all columns that define the computation, including columns of later versions, but not who asked
    and when."""
    return {
        **{name: row[name] for name in JOBS.columns.keys()},  # noqa: SIM118 - iterating gives the columns
        **retried_values(now, None),
        "model": row["computed_by"],
        "attempt": 0,
        "errors": None,
        "history": None,
        # A copy that took the original's answer would prove nothing.
        "reuse": None,
        "content_key": None,
        "prior": None,
        "row": None,
        "custom_id": None,
        "owner": None,
        "request_id": None,
        "idempotency_key": None,
        "fingerprint": None,
        "request": None,
        "metadata": {COPIED_FROM: row["id"]},
        # The copy's prompt must contain the same date as the original's.
        "created_at": requested_at(row["created_at"], row["batch_created_at"]),
    }
