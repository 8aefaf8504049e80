"""Statements about embeddings.

They have a table of their own, since rows of `jobs` are small. They are written in the transaction that ends
their job. Only a job that succeeded has one, and none of those is queued again.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from sqlalchemy import Connection, Table, bindparam, insert, select

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import EmbeddingRow, JobRow

EMBEDDINGS = cast(Table, EmbeddingRow.__table__)
_READ_AT_ONCE = 500  # jobs per statement


def write(connection: Connection, worker_id: str, of_jobs: Mapping[tuple[str, int], bytes | None]) -> None:
    """Write the embeddings of jobs, by (job id, attempt).

    Fenced: nothing is written for jobs that this worker has lost. The caller has locked the jobs, and ends
    them next.
    """
    rows = [
        {
            "written_job": job_id,
            "written_attempt": attempt,
            "written_worker": worker_id,
            "new_data": data,
        }
        for (job_id, attempt), data in of_jobs.items()
        if data is not None
    ]
    if rows:
        connection.execute(_WRITE, rows)


def read(connection: Connection, job_ids: Sequence[str]) -> dict[str, bytes]:
    """Return embeddings by job id, without jobs that have none."""
    found: dict[str, bytes] = {}
    for start in range(0, len(job_ids), _READ_AT_ONCE):
        rows = connection.execute(_READ, {"job_ids": job_ids[start : start + _READ_AT_ONCE]})
        found.update((row.job_id, row.data) for row in rows)
    return found


# Built once: building a statement takes longer than SQLite takes to execute it.
_NAMED = among(EmbeddingRow.job_id, "job_ids")
_READ = select(EMBEDDINGS).where(_NAMED)
_OURS = select(JobRow.id, bindparam("new_data", type_=EMBEDDINGS.c.data.type)).where(
    JobRow.id == bindparam("written_job"),
    JobRow.state == JobState.RUNNING,
    JobRow.attempt == bindparam("written_attempt"),
    JobRow.worker == bindparam("written_worker"),
)
_WRITE = insert(EMBEDDINGS).from_select(("job_id", "data"), _OURS)
