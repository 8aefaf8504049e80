"""Rows of the bundled model, computed again by a real worker: the same bits, or it is said why not."""

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import update

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.sql.jobs import JOBS
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.model.gguf.file import GgufFile
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.servers import worker_env

PATIENCE = 120.0


@pytest.fixture
def quick(quick: Settings) -> Settings:
    """With the reference runner on the bundled model, whatever others use: its name is known here."""
    return quick.model_copy(update={"reference": True, "model": demo_model()})


def verify(settings: Settings, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["verify", "night", "--sample", "5", *arguments], env=worker_env(settings)
    )


@pytest.mark.slow  # tests/integration/jobs/verifying compares rows
@on_sqlite
def test_rows_computed_again_are_equal_to_the_bit_and_what_is_not_is_found(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    settings = jobs_client.settings
    prompts = [f"Write a haiku about rain and {number}" for number in range(5)]
    # As a chat and plain, drawn and greedy; computed 4 at once, and again 32 at once.
    items: list[Any] = [{"prompt": text, "temperature": n % 2} for n, text in enumerate(prompts)]
    items[4] = {"messages": [{"role": "user", "content": prompts[4]}], "temperature": 0.8}
    with start_worker("first", "--max-sequences", "4"):
        ids = jobs_client.enqueue_many(items, batch="night", max_tokens=40, repetition_penalty=1.1)
        jobs_client.wait(ids, timeout=PATIENCE)
    before = {job.id: job for job in jobs_client.results(ids)}
    (name,) = {job.arithmetic for job in before.values()}
    arithmetic = Arithmetic.parse(str(name))
    with GgufFile.open(demo_model()) as file:
        assert arithmetic.model == file.digest()[:16]
    assert (arithmetic.runner, arithmetic.weights) == ("numpy", "f32")

    nobody = verify(settings)
    assert nobody.exit_code == 1
    assert "no live worker serves 'nightmill-demo', which these rows are of" in nobody.stderr

    with start_worker("second"):
        done = verify(settings)
        assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "night: 5 of 5 rows equal to the bit")
        assert {job.id: job for job in jobs_client.results(ids)} == before
        assert [batch.name for batch in jobs_client.list_batches()] == ["night"]

        other = str(replace(arithmetic, device="NVIDIA H200"))
        with jobs_client.database.write() as connection:
            connection.execute(update(JOBS).where(JobRow.id == ids[0]).values(text="tampered"))
            connection.execute(
                update(JOBS).where(JobRow.id == ids[1]).values(text="another", arithmetic=other)
            )
        done = verify(settings, "--json")
        assert done.exit_code == 1
        rows = {row["job_id"]: row for row in json.loads(done.stdout)["rows"]}
        assert (rows[ids[0]]["verdict"], rows[ids[0]]["parting"]["then"]) == ("defect", "tampered")
        explained = f"device: NVIDIA H200, now {arithmetic.device}"
        assert (rows[ids[1]]["verdict"], rows[ids[1]]["differences"]) == ("explained", [explained])
        assert [rows[job_id]["verdict"] for job_id in ids[2:]] == ["equal"] * 3
