"""The log-probabilities of jobs that asked for them: the SQL of one table.

They are apart from `jobs` and `answers`, whose rows are small. As answers they are written with the end of
their job, in the same transaction, and deleted when it is queued again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from sqlalchemy import Connection, Table, bindparam, delete, insert, select

from nightmill.jobs.contract import JobState
from nightmill.jobs.sql.tables import JobRow, LogprobsRow

LOGPROBS = cast(Table, LogprobsRow.__table__)
_COLUMNS = ("job_id", "number", "data")
_READ_AT_ONCE = 100  # jobs


def write(
    connection: Connection, worker_id: str, of_jobs: Mapping[tuple[str, int], Sequence[bytes | None]]
) -> None:
    """Write those of jobs, by job id and attempt, in the order of their answers.

    Fenced: of jobs that are not this worker's any more nothing is written. The caller has locked the jobs,
    and ends them next.
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
        for number, data in enumerate(answers)
        if data is not None
    ]
    if rows:
        connection.execute(_WRITE, rows)


def read(connection: Connection, job_ids: Sequence[str]) -> dict[str, dict[int, bytes]]:
    """By job id and number of the answer; jobs that have none are left out."""
    found: dict[str, dict[int, bytes]] = {}
    for start in range(0, len(job_ids), _READ_AT_ONCE):
        for row in connection.execute(_READ, {"job_ids": job_ids[start : start + _READ_AT_ONCE]}):
            found.setdefault(row.job_id, {})[row.number] = row.data
    return found


def forget(connection: Connection, job_ids: Iterable[str]) -> None:
    """Drop those of jobs that are to have others."""
    connection.execute(_FORGET, {"job_ids": list(job_ids)})


# Built once: to build a statement takes longer than SQLite takes to run it.
_NAMED = LogprobsRow.job_id.in_(bindparam("job_ids", expanding=True))
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
