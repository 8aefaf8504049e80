"""A file that changes while it is submitted: the batch is not complete, and holds no row of the new file."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchConflictError, BatchFileError, BatchNotFoundError
from nightmill.jobs.sql.batches import BatchStore
from tests.integration.jobs.batches.rows import jobs_of
from tests.support.servers import worker_env

ROWS = 150
PAD = "x" * 300  # so that the file is longer than what is read ahead
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are entered 50 at a time."""
    monkeypatch.setattr("nightmill.jobs.batches.grouping.ROWS_PER_TRANSACTION", 50)


def lines(label: str, rows: int = ROWS) -> bytes:
    return b"".join(
        json.dumps({"prompt": f"{label} {n}", "metadata": {"pad": PAD}}).encode() + b"\n"
        for n in range(1, rows + 1)
    )


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 5)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(lines("new", 10))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(lines("new"))
    other.replace(path)


def rewrite_with_its_old_time(path: Path) -> None:
    found = path.stat()
    path.write_bytes(path.read_bytes().replace(b"old", b"new"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def rewrite_as_it_was(path: Path) -> None:
    """As an editor does: for a moment it was empty."""
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path)


def submit(client: Client, path: Path, change: Change | None = None, after: int = 1) -> Batch:
    """Submit it as `night`; it changes when so many rows are entered."""

    def on_rows(read: int) -> None:
        if change is not None and read >= after and not done:
            done.append(change(path))

    done: list[object] = []
    return client.submit_batch(path, name="night", on_rows=on_rows)


@pytest.mark.parametrize("after", [1, ROWS])
@pytest.mark.parametrize(
    "change", [truncate, append, replace, Path.unlink, rewrite_with_its_old_time, rewrite_as_it_was]
)
def test_a_batch_of_a_file_that_changes_is_not_complete_and_goes_on_with_the_old_one(
    sqlite_client: Client, tmp_path: Path, change: Change, after: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines("old"))
    with pytest.raises(
        BatchFileError, match=r"rows\.jsonl: changed while it was submitted, so batch 'night' is"
    ):
        submit(sqlite_client, path, change, after)
    batch = sqlite_client.get_batch("night")
    status = batch.status()
    assert (status.state, status.row_count) == ("submitting", None)
    before = jobs_of(batch)
    assert {number: job.prompt for number, job in before.items()} == {n: f"old {n}" for n in before}
    assert len(before) == (50 if after == 1 else ROWS)
    if change not in (Path.unlink, rewrite_as_it_was):
        with pytest.raises(BatchConflictError, match="with other content of the file"):
            submit(sqlite_client, path)
    path.write_bytes(lines("old"))
    again = submit(sqlite_client, path)
    assert again.status().row_count == ROWS
    assert [job.prompt for job in jobs_of(again).values()] == [f"old {n}" for n in range(1, ROWS + 1)]
    assert {number: job.id for number, job in jobs_of(again).items() if number in before} == {
        number: job.id for number, job in before.items()
    }


def test_or_it_is_deleted_and_the_new_file_submitted(sqlite_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines("old"))
    with pytest.raises(BatchFileError, match="nightmill batch cancel night, nightmill batch delete night"):
        submit(sqlite_client, path, replace)
    batch = sqlite_client.get_batch("night")
    batch.cancel()
    batch.delete()
    assert [job.prompt for job in jobs_of(submit(sqlite_client, path)).values()][-1] == f"new {ROWS}"


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl.gz", "rows.parquet"])
def test_in_every_format(sqlite_client: Client, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    prompts = [f"old {os.urandom(300).hex()} {n}" for n in range(ROWS)]  # gzip and Parquet stay long
    if name.endswith(".csv"):
        path.write_text("\n".join(["prompt", *prompts, ""]))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"".join(json.dumps({"prompt": p}).encode() + b"\n" for p in prompts)))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"prompt": prompts}), path)
    whole = path.read_bytes()
    with pytest.raises(BatchFileError, match="changed while it was submitted"):
        submit(sqlite_client, path, truncate)
    assert all(job.prompt in prompts for job in jobs_of(sqlite_client.get_batch("night")).values())
    path.write_bytes(whole)
    assert [job.prompt for job in jobs_of(submit(sqlite_client, path)).values()] == prompts


def test_a_change_before_the_first_row_enters_none(
    sqlite_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines("old"))
    last_row = BatchStore.last_row

    def changing(self: BatchStore, name: str) -> int:
        append(path)
        return last_row(self, name)

    monkeypatch.setattr(BatchStore, "last_row", changing)
    with pytest.raises(BatchFileError, match="changed while"):
        submit(sqlite_client, path)
    with pytest.raises(BatchNotFoundError):
        sqlite_client.get_batch("night")


def test_bytes_that_changed_without_a_trace_are_found_at_the_end(
    sqlite_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines("old"))
    monkeypatch.setattr("nightmill.jobs.formats.inputs._stamp", lambda found: ((), 0))  # a coarse clock
    with pytest.raises(BatchFileError, match="changed while it was submitted"):
        submit(sqlite_client, path, rewrite_with_its_old_time, ROWS)
    assert sqlite_client.get_batch("night").status().state == "submitting"


def test_the_command_says_so_in_one_line_and_fails(
    sqlite_settings: Settings, sqlite_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines("old"))
    insert = BatchStore.insert_rows

    def changing(self: BatchStore, name: str, rows: Sequence[dict[str, Any]]) -> bool:
        append(path)
        return insert(self, name, rows)

    monkeypatch.setattr(BatchStore, "insert_rows", changing)
    arguments = ["batch", "submit", str(path), "--name", "night"]
    result = CliRunner().invoke(main, arguments, env=worker_env(sqlite_settings))
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: changed while it was submitted, so batch 'night' is not complete")
