"""Three rows, batches that follow them, and a worker that ends rows: for tests of rows that follow rows."""

from typing import Any

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.integration.jobs.batches.rows import jobs_of

ROWS: list[dict[str, Any]] = [
    {"id": 1, "review": "fine"},
    {"id": 2, "review": "poor"},
    {"id": 3, "review": "so so"},
]
RATE = "Rate {{ review }}:\n{{ prior.content }}"


def registered(client: Client, letter: str) -> Claims:
    claims = Claims(client.database, letter * 32)
    claims.register("host", 1, "model", None)
    return claims


def ask(client: Client, **more: Any) -> Batch:
    return client.submit_batch(ROWS, name="drafts", template="Write: {{ review }}", column="draft", **more)


def follow(
    client: Client, after: str = "drafts", name: str = "judged", template: str = RATE, **more: Any
) -> Batch:
    return client.submit_batch(after=after, name=name, template=template, **more)


def finish(worker: Claims, jobs: list[Job], said: str = "draft {row}", **more: Any) -> int:
    claims = worker.claim([job.id for job in jobs])
    rows = {job.id: job.row for job in jobs}
    values: dict[str, Any] = {"stop_reason": StopReason.EOS} | more
    return worker.finish(
        [
            Outcome(
                claim.job_id,
                claim.attempt,
                values["stop_reason"],
                said.format(row=rows[claim.job_id]),
                3,
                5,
                error=values.get("error"),
            )
            for claim in claims
        ]
    )


def rows_of(batch: Batch) -> list[Job]:
    return [job for _, job in sorted(jobs_of(batch).items())]


def states(batch: Batch) -> list[str]:
    return [str(job.state) + (" held" if job.held else "") for job in rows_of(batch)]
