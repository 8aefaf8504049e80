"""Insertion of jobs, with the batches that they name and their idempotency keys, in one transaction."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from nightmill.jobs.errors import IdempotencyConflictError, InvalidRequestError
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import chunked, dialect_insert
from nightmill.jobs.sql.locks import HeldBatch, hold_batches, refuse_closed
from nightmill.jobs.sql.many import insert_jobs
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import BatchRow, JobRow


@retried
def add(rows: Sequence[Mapping[str, Any]], database: Database) -> dict[str, str]:
    """Insert rows in a separate transaction; see `insert`."""
    with database.write() as connection:
        return insert(rows, connection)


@retried
def add_batches(rows: Sequence[Mapping[str, Any]], database: Database) -> None:
    """Insert the batches that rows name in a separate transaction, where they are missing."""
    with database.write() as connection:
        insert_batches(rows, connection)


def insert_batches(rows: Sequence[Mapping[str, Any]], connection: Connection) -> None:
    """Insert the batches that rows name in the caller's transaction, where they are missing."""
    named = {row["batch"]: row for row in rows if row.get("batch")}
    values = [
        {"name": name, "model": row.get("model"), "metadata": {}, "created_at": row["created_at"]}
        for name, row in sorted(named.items())
    ]
    statement = dialect_insert(connection, BatchRow.__table__).on_conflict_do_nothing(index_elements=["name"])
    connection.execute(statement, values)


def insert(rows: Sequence[Mapping[str, Any]], connection: Connection) -> dict[str, str]:
    """Insert job rows, all with the same keys, in the caller's transaction.

    Returns the rows that were not inserted because an equal job has their idempotency key: {new id: id of the
    existing job}. Raises IdempotencyConflictError if the existing job has other content, and
    BatchConflictError if a batch accepts no more jobs: then nothing is inserted, and `position` names the
    row. Missing batches are created.
    """
    _enter_batches(rows, connection)
    if not any(row.get("idempotency_key") for row in rows):
        insert_jobs(connection, rows)
        return {}
    # All transactions insert keys in one order, so that two cannot deadlock.
    missing = sorted(rows, key=_key_of)
    present: dict[str, tuple[str, str | None]] = {}
    while missing:  # repeated if a job with a key was pruned meanwhile
        insert_jobs(connection, missing, unless_there="idempotency_key")
        present |= _find_keys(map(_key_of, missing), connection)
        missing = [row for row in missing if _key_of(row) and _key_of(row) not in present]
    try:
        return _resolve_keys(rows, present)
    except IdempotencyConflictError:  # the transaction may be the caller's and continue
        for chunk in chunked(row["id"] for row in rows):
            connection.execute(delete(JobRow).where(JobRow.id.in_(chunk)))
        raise


def _enter_batches(rows: Sequence[Mapping[str, Any]], connection: Connection) -> None:
    """Insert the batches that `rows` name, and lock them; raises BatchConflictError."""
    names = {row["batch"]: row for row in rows if row.get("batch")}
    there: dict[str, HeldBatch] = {}
    while missing := names.keys() - there.keys():  # repeated if one was pruned between the two statements
        insert_batches([names[name] for name in missing], connection)
        there |= hold_batches(connection, sorted(missing))
    for position, row in enumerate(rows):
        try:
            refuse_closed(there.get(row.get("batch") or ""))
        except InvalidRequestError as error:
            error.position = position
            raise


def _find_keys(keys: Iterable[str], connection: Connection) -> dict[str, tuple[str, str | None]]:
    """Return (id, fingerprint) of the existing jobs by idempotency key."""
    present: dict[str, tuple[str, str | None]] = {}
    for chunk in chunked(keys):
        query = select(JobRow.idempotency_key, JobRow.id, JobRow.fingerprint).where(
            JobRow.idempotency_key.in_(chunk)
        )
        for key, job_id, fingerprint in connection.execute(query):
            if key is not None:
                present[key] = (job_id, fingerprint)
    return present


def _resolve_keys(
    rows: Sequence[Mapping[str, Any]], present: Mapping[str, tuple[str, str | None]]
) -> dict[str, str]:
    replaced: dict[str, str] = {}
    for position, row in enumerate(rows):
        key = row.get("idempotency_key")
        if not key:
            continue
        job_id, fingerprint = present[key]
        if fingerprint != row["fingerprint"]:
            conflict = IdempotencyConflictError(
                f"idempotency_key: {key!r} belongs to job {job_id}, which has another prompt, model or "
                "parameters; use a new key for new content",
                field="idempotency_key",
            )
            conflict.position = position
            raise conflict
        if job_id != row["id"]:
            replaced[row["id"]] = job_id
    return replaced


def _key_of(row: Mapping[str, Any]) -> str:
    return row.get("idempotency_key") or ""
