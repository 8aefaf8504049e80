"""A batch whose rows wait for a model that nobody serves says so, wherever its status is."""

from datetime import timedelta
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.printing import describe_status
from nightmill.jobs.errors import EmptyBatchFileError
from nightmill.jobs.reply.batch_status import status_values
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.batches.rows import finish, jobs_of, write
from tests.support.servers import Clock


def served(client: Client, worker_id: str, model: str) -> Claims:
    claims = Claims(client.database, worker_id * 32)
    claims.register("host", 1, model, None)
    claims.beat(WorkerState.READY)
    return claims


def test_models_that_rows_name_and_nobody_serves_are_named(client: Client, tmp_path: Path) -> None:
    here, gone = served(client, "a", "here"), served(client, "b", "gone")
    rows = [{"prompt": "p", "model": model} for model in ("here", "gone", "gone")]
    rows += [{"prompt": "for any"}]
    batch = client.submit_batch(
        write(tmp_path / "rows.jsonl", rows), name="night", deadline=timedelta(hours=8)
    )
    assert batch.status().unserved == []
    gone.sign_off()
    status = batch.status()
    assert status.unserved == ["gone"] and status_values(status)["unserved"] == ["gone"]
    assert "no live worker serves 'gone'" in describe_status(status) and "they expire" in describe_status(
        status
    )
    assert batch.status(errors=False).unserved == ["gone"]  # nothing has ended lately
    finish(here, [jobs_of(batch)[1], jobs_of(batch)[4]])
    assert batch.status().estimated_end is None
    here.sign_off()
    client.cancel_batch("night")
    assert batch.status().unserved == []  # nothing waits


def test_a_batch_for_one_model_or_any_waits_for_workers(client: Client, tmp_path: Path) -> None:
    worker = served(client, "a", "m")
    file = write(tmp_path / "rows.jsonl", [{"prompt": "p", "model": "other"}])
    one = client.submit_batch(file, name="one", model="m")
    any_model = client.submit_batch(write(tmp_path / "any.jsonl", [{"prompt": "p"}]), name="any")
    assert one.status().unserved == any_model.status().unserved == []
    assert one.renamed == {"other": 1} and any_model.renamed == {}
    worker.sign_off()
    assert one.status().unserved == ["m"]
    assert any_model.status().unserved == [None]
    assert "no worker is running" in describe_status(any_model.status())


def test_rows_whose_time_has_not_come_wait_for_nobody(client: Client, tmp_path: Path, clock: Clock) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "p"}])
    batch = client.submit_batch(file, name="later", scheduled_at=clock() + timedelta(hours=1))
    assert batch.status().unserved == []
    clock.advance(hours=1)
    assert batch.status().unserved == [None]


@pytest.mark.parametrize("content", ["\n \n", "# prompt\n"])
def test_a_file_without_rows_has_failed(client: Client, tmp_path: Path, content: str) -> None:
    csv = content.startswith("#")
    path = tmp_path / ("rows.csv" if csv else "rows.jsonl")
    path.write_text("prompt\n" if csv else content)
    with pytest.raises(EmptyBatchFileError, match="holds no rows"):
        client.submit_batch(path, name="none")
    status = client.get_batch("none").status()
    assert (status.state, status.expected_rows) == ("failed", 0)
    assert client.submit_batch(path, name="none").status().state == "failed"  # the same again
