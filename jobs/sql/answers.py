"""Statements about the answers of jobs with several answers.

They are written in the transaction that ends their job, and deleted when it is queued again. They are read
for ended jobs only, so leftovers of another attempt are never seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from sqlalchemy import Connection, Table, bindparam, delete, insert, select

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.sql.named import among
from nightmill.jobs.sql.tables import AnswerRow, JobRow

ANSWERS = cast(Table, AnswerRow.__table__)
_COLUMNS = ("job_id", "number", "text", "stop_reason", "completion_tokens", "seed")
_READ_AT_ONCE = 100  # jobs per statement


def write(
    connection: Connection, worker_id: str, of_jobs: Mapping[tuple[str, int], Sequence[Answer]]
) -> None:
    """Write all answers of jobs, by (job id, attempt).

    Fenced: nothing is written for jobs that this worker has lost. The caller has locked the jobs, and ends
    them next.
    """
    rows = [
        {
            "written_job": job_id,
            "written_attempt": attempt,
            "written_worker": worker_id,
            "new_number": number,
            "new_text": answer.text if number else None,
            "new_stop_reason": answer.stop_reason,
            "new_completion_tokens": answer.completion_tokens,
            "new_seed": answer.seed,
        }
        for (job_id, attempt), answers in of_jobs.items()
        for number, answer in enumerate(answers)
    ]
    if rows:
        connection.execute(_WRITE, rows)


def read(connection: Connection, texts: Mapping[str, str | None]) -> dict[str, tuple[Answer, ...]]:
    """Return the answers by job id, without jobs that have none. `texts`: the first answers' texts."""
    found: dict[str, list[Answer]] = {}
    ids = list(texts)
    for start in range(0, len(ids), _READ_AT_ONCE):
        for row in connection.execute(_READ, {"job_ids": ids[start : start + _READ_AT_ONCE]}):
            text = row.text if row.number else texts[row.job_id]
            answer = Answer(text or "", StopReason.read(row.stop_reason), row.completion_tokens, row.seed)
            found.setdefault(row.job_id, []).append(answer)
    return {job_id: tuple(answers) for job_id, answers in found.items()}


def forget(connection: Connection, job_ids: Iterable[str]) -> None:
    """Delete the answers of jobs that will be run again."""
    connection.execute(_FORGET, {"job_ids": list(job_ids)})


# Built once: building a statement takes longer than SQLite takes to execute it.
_NAMED = among(AnswerRow.job_id, "job_ids")
_READ = select(ANSWERS).where(_NAMED).order_by(AnswerRow.job_id, AnswerRow.number)
_FORGET = delete(AnswerRow).where(_NAMED)
_OURS = select(
    JobRow.id,
    *(bindparam(f"new_{name}", type_=ANSWERS.c[name].type) for name in _COLUMNS[1:]),
).where(
    JobRow.id == bindparam("written_job"),
    JobRow.state == JobState.RUNNING,
    JobRow.attempt == bindparam("written_attempt"),
    JobRow.worker == bindparam("written_worker"),
)
_WRITE = insert(ANSWERS).from_select(_COLUMNS, _OURS)
