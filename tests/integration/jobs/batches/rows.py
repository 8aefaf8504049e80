"""What tests of batches do with rows."""

import json
from collections.abc import Sequence
from pathlib import Path

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims, Outcome


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def jobs_of(batch: Batch) -> dict[int, Job]:
    return {job.row or 0: job for job in batch.store.in_order(batch.name, list(JobState))}


def finish(worker: Claims, jobs: Sequence[Job], reason: StopReason = StopReason.EOS) -> None:
    for claim in worker.claim([job.id for job in jobs]):
        outcome = Outcome(claim.job_id, claim.attempt, reason, f"text of {claim.prompt}", 3, 5)
        worker.finish([outcome])
