"""The tokens of unfinished jobs, saved so that another attempt can go on from them: the SQL of one table.

They are apart from `jobs`, whose rows are wide and indexed, since they are written every few seconds. A job
that has ended has none: whoever ends jobs calls `forget_ended` in the same transaction.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, Table, bindparam, delete, exists, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from nightmill.jobs.contract import FINAL_STATES, JobState
from nightmill.jobs.sql.tables import JobRow, PartialRow


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """What an attempt had drawn. `fingerprint`: of the model and the prompt that the tokens follow.

    Of a job with several answers the tokens of each, as `worker.service.answering` packs them.
    """

    job_id: str
    attempt: int
    fingerprint: str
    token_ids: tuple[int, ...]


def save(connection: Connection, worker_id: str, group: Sequence[SavedTokens], now: datetime) -> int:
    """Write the tokens of running jobs, each in place of what was saved before, as one statement.

    Fenced: of jobs that are not this worker's any more nothing is written. Returns how many were. The caller
    has locked the jobs, so that none of them ends at the same time.
    """
    rows = [
        {
            "saved_job": one.job_id,
            "saved_attempt": one.attempt,
            "saved_worker": worker_id,
            "new_fingerprint": one.fingerprint,
            "new_tokens": _pack(one.token_ids),
            "new_saved_at": now,
        }
        for one in group
    ]
    statement = _SAVE_SQLITE if connection.dialect.name == "sqlite" else _SAVE_POSTGRESQL
    counting = {"preserve_rowcount": True}  # SQLAlchemy forgets the count of an INSERT otherwise
    return connection.execute(statement, rows, execution_options=counting).rowcount


def find(connection: Connection, job_ids: Iterable[str]) -> dict[str, SavedTokens]:
    """What was saved of these jobs, by job id; bytes that are not a whole list of tokens are left out."""
    rows = connection.execute(_FIND, {"job_ids": list(job_ids)})
    return {
        row.job_id: SavedTokens(row.job_id, row.attempt, row.fingerprint, _unpack(row.tokens))
        for row in rows
        if len(row.tokens) % _TOKEN_BYTES == 0
    }


def forget_ended(connection: Connection, job_ids: Sequence[str] | None = None) -> None:
    """Drop the tokens of jobs (of all, or of those named) that have ended."""
    if job_ids is None:
        connection.execute(_FORGET)
    else:
        connection.execute(_FORGET_NAMED, {"job_ids": job_ids})


def _save_statement(insert: Any) -> Any:
    ours = select(
        JobRow.id,
        JobRow.attempt,
        bindparam("new_fingerprint", type_=PartialRow.fingerprint.type),
        bindparam("new_tokens", type_=PartialRow.tokens.type),
        bindparam("new_saved_at", type_=PartialRow.saved_at.type),
    ).where(
        JobRow.id == bindparam("saved_job"),
        JobRow.state == JobState.RUNNING,
        JobRow.attempt == bindparam("saved_attempt"),
        JobRow.worker == bindparam("saved_worker"),
    )
    columns = ["job_id", "attempt", "fingerprint", "tokens", "saved_at"]
    adding = insert(cast(Table, PartialRow.__table__)).from_select(columns, ours)
    return adding.on_conflict_do_update(
        index_elements=["job_id"], set_={name: adding.excluded[name] for name in columns[1:]}
    )


# Built once: to build a statement takes longer than SQLite takes to run it.
_NAMED = PartialRow.job_id.in_(bindparam("job_ids", expanding=True))
_FIND = select(PartialRow.__table__).where(_NAMED)
_FORGET = delete(PartialRow).where(
    exists().where(JobRow.id == PartialRow.job_id, JobRow.state.in_(sorted(FINAL_STATES)))
)
_FORGET_NAMED = _FORGET.where(_NAMED)
_SAVE_SQLITE = _save_statement(sqlite_insert)
_SAVE_POSTGRESQL = _save_statement(postgresql_insert)


_TOKEN_BYTES = 4


def _pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit integers, the lowest byte first."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    packed = array("i", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
