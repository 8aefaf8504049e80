"""Results as a folder of Parquet files, and a folder of Parquet files as input."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import shards
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.support.servers import worker_env

ROWS = 25


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_OF_A_PART", 10)


def test_a_folder_of_shards_comes_back_as_one(
    sqlite_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        words = [f"{number}{row}" for row in range(9)][: ROWS - 9 * number]
        (tmp_path / "in").mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"word": words}), tmp_path / "in" / f"{number}.parquet")
    template: dict[str, Any] = {"template": "{{ word }}", "column": "label"}
    batch = sqlite_client.submit_batch(tmp_path / "in", **template)
    assert batch.name.startswith("in-")
    assert sqlite_client.submit_batch(f"{tmp_path}/in/", **template).name == batch.name
    claims = Claims(sqlite_client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    ids = [job.id for job in sqlite_client.list_jobs(limit=100)][::-1]

    def work(some: list[str]) -> None:
        for claim in claims.claim(some):
            word = str(claim.messages[0]["content"]) if claim.messages else ""
            claims.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, f"on {word}", 1, 2)])

    def read() -> list[str]:
        return parquet.read_table(tmp_path / "out", columns=["label"])["label"].to_pylist()

    work(ids[:4])
    target = f"{tmp_path}/out/"
    assert batch.write_results(target) == 4
    assert read() == [f"on {number:02d}" for number in range(4)]
    work(ids[4:])
    for name, value in worker_env(sqlite_client.settings).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["batch", "results", batch.name, "-o", target])  # in their place
    assert (done.exit_code, done.output) == (0, f"{target}: 25 rows\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("part-00000.parquet", "part-00001.parquet", "part-00002.parquet"),
    ]
    assert read() == [f"on {number}{row}" for number in range(3) for row in range(9)][:ROWS]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    # Killed between the two renames: the former results are found. A foreign folder is kept.
    (tmp_path / "out").rename(tmp_path / ".out.old")
    assert batch.write_results(target) == ROWS
    assert len(read()) == ROWS and not (tmp_path / ".out.old").exists()
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "mine.txt").write_text("mine")
    with pytest.raises(BatchFileError, match=r"out/: .out.old beside it holds 'mine.txt'"):
        batch.write_results(target)
    assert len(read()) == ROWS and (tmp_path / ".out.old" / "mine.txt").read_text() == "mine"

    # What is not of this batch stays as it is.
    other = sqlite_client.submit_batch(tmp_path / "in" / "0.parquet", **template)
    with pytest.raises(BatchFileError, match=r"out/: is there already, and is not of batch '0-"):
        other.write_results(target)
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(BatchFileError, match=r"out/: holds 'mine.txt', which is not of results"):
        batch.write_results(target)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    (tmp_path / "out" / "mine.txt").unlink()
    assert len(read()) == ROWS
