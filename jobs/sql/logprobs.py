"""Statements about the log-probabilities of answers.

They have a table of their own, since rows of `jobs` and `answers` are small. They are written in the
transaction that ends their job, and deleted when it is queued again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from sqlalchemy import Connection, Table, bindparam, delete, insert, select

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import JobRow, LogprobsRow

LOGPROBS = cast(Table, LogprobsRow.__table__)
_COLUMNS = ("job_id", "number", "data")
_READ_AT_ONCE = 100  # jobs per statement
OF_PROMPT, TOKEN_IDS = -1, -2
"""In place of an answer's number: the prompt's log-probabilities; the token ids of prompt and answers."""


def write(
    connection: Connection, worker_id: str, of_jobs: Mapping[tuple[str, int], Mapping[int, bytes | None]]
) -> None:
    """Write the log-probabilities of jobs, by (job id, attempt) and number of the answer.

    Fenced: nothing is written for jobs that this worker has lost. The caller has locked the jobs, and ends
    them next.
    """
    rows = [
        {
            "written_job": job_id,
            "written_attempt": attempt,
            "written_worker": worker_id,
            "new_number": number,
            "new_data": data,
        }
        for (job_id, attempt), answers in of_jobs.items()
        for number, data in answers.items()
        if data is not None
    ]
    if rows:
        connection.execute(_WRITE, rows)


def read(connection: Connection, job_ids: Sequence[str]) -> dict[str, dict[int, bytes]]:
    """Return packed log-probabilities by job id and number of the answer, without jobs that have none."""
    found: dict[str, dict[int, bytes]] = {}
    for start in range(0, len(job_ids), _READ_AT_ONCE):
        for row in connection.execute(_READ, {"job_ids": job_ids[start : start + _READ_AT_ONCE]}):
            found.setdefault(row.job_id, {})[row.number] = row.data
    return found


def forget(connection: Connection, job_ids: Iterable[str]) -> None:
    """Delete the log-probabilities of jobs that will be run again."""
    connection.execute(_FORGET, {"job_ids": list(job_ids)})


# Built once: building a statement takes longer than SQLite takes to execute it.
_NAMED = among(LogprobsRow.job_id, "job_ids")
_READ = select(LOGPROBS).where(_NAMED)
_FORGET = delete(LogprobsRow).where(_NAMED)
_OURS = select(
    JobRow.id,
    *(bindparam(f"new_{name}", type_=LOGPROBS.c[name].type) for name in _COLUMNS[1:]),
).where(
    JobRow.id == bindparam("written_job"),
    JobRow.state == JobState.RUNNING,
    JobRow.attempt == bindparam("written_attempt"),
    JobRow.worker == bindparam("written_worker"),
)
_WRITE = insert(LOGPROBS).from_select(_COLUMNS, _OURS)
