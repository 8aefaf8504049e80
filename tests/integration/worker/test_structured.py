"""Rows that say what their answer must be, from Python and a file, through a real worker."""

import json
from pathlib import Path

import pytest
from jsonschema import validate
from pydantic import BaseModel, Field

from nightmill.jobs.base.contract import ConstraintKind, JobState, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import JobRow
from tests.integration.worker.conftest import StartWorker, on_postgresql, on_sqlite

PATIENCE = 120.0
SLOW = {"type": "integer", "multipleOf": 99_999_999}  # takes minutes to compile


class Haiku(BaseModel):
    """A schema of a few dozen tokens."""

    season: str = Field(max_length=10)
    lines: int = Field(ge=1, le=9)


@pytest.mark.slow  # tests/unit/grammar and tests/unit/worker hold the same without a process
@on_postgresql
def test_answers_are_what_their_rows_ask_for(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
    rows = [
        *({"prompt": f"The mill {n}", "json_schema": schema, "max_tokens": 200} for n in range(6)),
        {"prompt": "The mill", "regex": "(?=a)"},
        {"prompt": "The mill", "json_schema": {"not": {}}},
        {"prompt": "The mill", "json_schema": schema, "max_tokens": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start_worker("worker", "--max-sequences", "8"):
        ids = [
            jobs_client.enqueue("The sea", response_format=Haiku, max_tokens=300, seed=n) for n in range(4)
        ]
        slow = jobs_client.enqueue("The sea", json_schema=SLOW)
        choice = jobs_client.enqueue("Yes or no?", choice=["yes", "no"])
        free = jobs_client.enqueue("The sea", max_tokens=20, seed=1)
        jobs_client.cancel(slow)
        batch = jobs_client.submit_batch(path, name="structured")
        status = batch.wait()
        jobs_client.wait([*ids, slow, choice, free], timeout=PATIENCE)
        verified = jobs_client.verify("structured", sample=7, timeout=PATIENCE)
    for job in map(jobs_client.get, ids):
        assert job.constrained is not None and job.constrained.kind is ConstraintKind.JSON_SCHEMA
        if job.stop_reason is StopReason.EOS:
            Haiku.model_validate(job.parsed)
    assert jobs_client.get(choice).text in ("yes", "no")
    assert jobs_client.get(slow).state is JobState.CANCELLED
    assert jobs_client.get(free).state is JobState.SUCCEEDED
    assert (status.rows, status.succeeded) == (9, 7)
    assert sum(status.stop_reasons.values()) == 9 and status.stop_reasons[StopReason.LENGTH] >= 1
    for job in batch.results():
        if job.stop_reason is StopReason.EOS:
            validate(job.parsed, schema)
    said = {job.custom_id: job.error for job in batch.errors()}
    assert said["row-7"] == "regex: look-around, including look-ahead and look-behind, is not supported"
    assert "the keyword 'not' at # cannot be enforced" in (said["row-8"] or "")
    assert len(verified.rows) == 7 and verified.equal


@on_sqlite
def test_what_a_newer_client_asks_for_fails_alone_and_can_be_retried(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    strange, plain = (jobs_client.enqueue("The sea", choice=["yes"]) for _ in range(2))
    with jobs_client.database.write() as connection:
        connection.execute(
            JobRow.__table__.update()
            .where(JobRow.id == strange)
            .values(constrained={"kind": "rhyme", "text": "ABAB"})
        )
    with start_worker("worker"):
        jobs_client.wait([strange, plain], timeout=PATIENCE)
        assert "upgrade the worker" in (jobs_client.get(strange).error or "")
        assert jobs_client.get(plain).text == "yes"
        with jobs_client.database.write() as connection:
            connection.execute(
                JobRow.__table__.update()
                .where(JobRow.id == strange)
                .values(constrained={"kind": "choice", "text": '["no"]'})
            )
        jobs_client.retry(strange)
        jobs_client.wait(strange, timeout=PATIENCE)
    assert jobs_client.get(strange).text == "no"
