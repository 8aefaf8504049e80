"""Statements about the saved tokens of jobs, from which another attempt can resume.

They are written every few seconds and therefore have a table of their own: rows of `jobs` are wide and
indexed. Every transaction that ends jobs calls `forget_ended`. Of ended jobs only those have tokens of which
an answer was cut: a larger `max_tokens` lets them continue.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, Table, and_, bindparam, delete, exists, not_, or_, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from nightmill.jobs.base.contract import FINAL_STATES, JobState, StopReason
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import AnswerRow, JobRow, PartialRow


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """The tokens of an attempt. `fingerprint` identifies the model and the prompt that they follow.

    For a job with several answers they are those of each answer, packed by `worker.service.outcomes`.
    """

    job_id: str
    attempt: int
    fingerprint: str
    token_ids: tuple[int, ...]


def save(connection: Connection, worker_id: str, group: Sequence[SavedTokens], now: datetime) -> int:
    """Write the tokens of running jobs, replacing those saved before, with one statement.

    Fenced: nothing is written for jobs that this worker has lost. Returns the number of written rows. The
    caller has locked the jobs, so that none of them ends at the same time.
    """
    rows = [
        {
            "saved_job": tokens.job_id,
            "saved_attempt": tokens.attempt,
            "saved_worker": worker_id,
            "new_fingerprint": tokens.fingerprint,
            "new_tokens": _pack(tokens.token_ids),
            "new_saved_at": now,
        }
        for tokens in group
    ]
    statement = _SAVE_SQLITE if connection.dialect.name == "sqlite" else _SAVE_POSTGRESQL
    counting = {"preserve_rowcount": True}  # otherwise SQLAlchemy drops the row count of an INSERT
    return connection.execute(statement, rows, execution_options=counting).rowcount


def find(connection: Connection, job_ids: Iterable[str]) -> dict[str, SavedTokens]:
    """Return the saved tokens by job id, without invalid ones."""
    rows = connection.execute(_FIND, {"job_ids": list(job_ids)})
    return {
        row.job_id: SavedTokens(row.job_id, row.attempt, row.fingerprint, _unpack(row.tokens))
        for row in rows
        if len(row.tokens) % _TOKEN_BYTES == 0
    }


def forget_ended(connection: Connection, job_ids: Sequence[str] | None = None) -> None:
    """Delete the tokens of ended jobs, of all or of those named, unless an answer was cut.

    The names may be those of jobs that others have ended meanwhile: a late hand-back deletes nothing that is
    kept.
    """
    if job_ids is None:
        connection.execute(_FORGET)
    else:
        connection.execute(_FORGET_NAMED, {"job_ids": job_ids})


def forget(connection: Connection, job_ids: Sequence[str]) -> None:
    """Delete the tokens of these jobs, which begin afresh."""
    connection.execute(_FORGET_ALL, {"job_ids": job_ids})


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


# Built once: building a statement takes longer than SQLite takes to execute it.
_NAMED = among(PartialRow.job_id, "job_ids")
_FIND = select(PartialRow.__table__).where(_NAMED)
CUT = and_(
    JobRow.state == JobState.SUCCEEDED,
    or_(
        JobRow.stop_reason == StopReason.LENGTH,
        and_(
            JobRow.answers > 1,
            exists()
            .where(AnswerRow.job_id == JobRow.id, AnswerRow.stop_reason == StopReason.LENGTH)
            .correlate(JobRow),
        ),
    ),
)
"""The condition for succeeded jobs of which an answer stopped by `length`."""
_FORGET = delete(PartialRow).where(
    exists().where(JobRow.id == PartialRow.job_id, JobRow.state.in_(sorted(FINAL_STATES)), not_(CUT))
)
_FORGET_ALL = delete(PartialRow).where(_NAMED)
_FORGET_NAMED = _FORGET.where(_NAMED)
_SAVE_SQLITE = _save_statement(sqlite_insert)
_SAVE_POSTGRESQL = _save_statement(postgresql_insert)


_TOKEN_BYTES = 4


def _pack(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian 32-bit integers."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    packed = array("i", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
