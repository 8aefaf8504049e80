"""Files that a user names for output: nothing but rows of the batch at hand is ever replaced."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import FileFormat, layout
from nightmill.jobs.formats.destination import partial_of
from nightmill.jobs.formats.ours import job_ids
from nightmill.jobs.formats.results import LATER, RESULT_COLUMNS
from tests.support.servers import clean_environment
from tests.unit.formats.destinations import (
    FOREIGN,
    FORMATS,
    named,
    names,
    refused,
    replace,
    rows,
    vetted,
    write,
)


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_appears_when_it_is_whole_and_one_of_the_batch_is_replaced(
    tmp_path: Path, format: FileFormat, errors: bool
) -> None:
    path = named(tmp_path, format)
    with vetted(path, format, errors=errors) as destination, destination.replace() as file:
        for row in rows(format, range(150), errors=errors):
            file.write(row)
        assert not path.exists()
    first = path.read_bytes()
    replace(path, format, range(150), errors=errors)
    assert path.read_bytes() == first
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_something_else_needs_overwrite(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    mixed = [*rows(format, range(3)), *rows(format, range(1000, 1001))]  # the last row is of another batch
    others: list[Callable[[], object]] = [
        lambda: path.write_bytes(FOREIGN),
        lambda: write(path, format, rows(format, range(1000, 1003))),
        lambda: write(path, format, mixed),
        lambda: write(path, format, rows(format, range(3), errors=True), errors=True),
    ]
    for make in others:
        make()
        before = path.read_bytes()
        refused(path, format, "is there already, and is not of batch 'night'")
        assert path.read_bytes() == before
    replace(path, format, overwrite=True)
    replace(path, format)  # now it is of this batch


def test_results_with_columns_of_the_users_own_are_the_users(tmp_path: Path) -> None:
    for format in (FileFormat.JSONL, FileFormat.OPENAI):
        path = write(named(tmp_path, format), format, [row | {"label": 1} for row in rows(format, range(3))])
        refused(path, format, "is not of batch 'night'")
    path = write(tmp_path / "out.csv", FileFormat.CSV, rows(FileFormat.CSV, range(3)))
    path.write_text("".join(f"{line},1\n" for line in path.read_text().splitlines()))
    refused(path, FileFormat.CSV, "is not of batch 'night'")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / "out.parquet", FileFormat.PARQUET, rows(FileFormat.PARQUET, range(3)))
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("label", arrow.array([1, 2, 3])), path)
    refused(path, FileFormat.PARQUET, "is not of batch 'night'")


@pytest.mark.parametrize("format", [FileFormat.JSONL, FileFormat.CSV, FileFormat.PARQUET])
def test_a_file_of_an_earlier_version_is_known_and_never_mixed_with_other_columns(
    tmp_path: Path, format: FileFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = named(tmp_path, format)
    made = [
        {name: value for name, value in row.items() if name not in LATER} for row in rows(format, range(3))
    ]
    with monkeypatch.context() as earlier:
        former = {name: kind for name, kind in RESULT_COLUMNS.items() if name not in LATER}
        earlier.setattr(layout, "RESULT_COLUMNS", former)
        earlier.setattr(layout, "LATER", ())
        write(path, format, made)
    with vetted(path, format) as destination:
        assert list(job_ids(path, format, errors=False)) == [row["id"] for row in made]
        if format is not FileFormat.PARQUET:
            with destination.grow() as file:
                assert len(file.ids()) == 3
                file.write(rows(format, range(3, 4))[0])
            assert len(list(job_ids(path, format, errors=False))) == 4
    replace(path, format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_without_rows_holds_nothing_to_lose(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    path.touch()
    replace(path, format)
    write(path, format, [])
    replace(path, format)


@pytest.mark.parametrize("format", [FileFormat.OPENAI, FileFormat.JSONL, FileFormat.CSV])
def test_a_row_that_a_crash_cut_in_two_is_still_of_the_batch(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    first = len(write(path, format, rows(format, range(1), text='a "b"\nc')).read_bytes())
    whole = write(path, format, rows(format, range(2), text='a "b"\nc')).read_bytes()
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        with vetted(path, format):
            pass
    path.write_bytes(whole + b"a note of my own\n")
    refused(path, format, "is not of batch 'night'")


def test_a_file_put_there_while_the_batch_ran_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with (
        pytest.raises(BatchFileError, match="is there already"),
        vetted(path, FileFormat.JSONL) as destination,
        destination.replace() as file,
    ):
        file.write(rows(FileFormat.JSONL, range(1))[0])
        path.write_bytes(FOREIGN)
    assert path.read_bytes() == FOREIGN
    assert names(tmp_path) == [path.name]


def test_a_second_writer_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    paths = {format: named(tmp_path, format, str(format)) for format in FORMATS}
    program = (
        "import sys; from nightmill.jobs.formats import Destination, FileFormat\n"
        "pairs = zip(sys.argv[1::2], sys.argv[2::2])\n"
        "held = [Destination(path, FileFormat(format)) for format, path in pairs]\n"
        "print('mine', flush=True)\n"
        "sys.stdin.read()"
    )
    arguments = [str(word) for pair in paths.items() for word in pair]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=clean_environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "mine\n"
        for format, path in paths.items():
            refused(path, format, "another process is writing it: wait until that has ended, or name another")
        first.kill()
    assert set(names(tmp_path)) == {partial_of(path).name for path in paths.values()}
    for format, path in paths.items():  # what a killed one leaves is taken over
        replace(path, format)
    assert set(names(tmp_path)) == {path.name for path in paths.values()}


def test_a_partial_that_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    path, thesis = tmp_path / "out.jsonl", tmp_path / "thesis"
    thesis.write_bytes(FOREIGN)
    partial = partial_of(path)
    for make in (
        lambda: partial.symlink_to(thesis),
        lambda: os.link(thesis, partial),
        lambda: os.mkfifo(partial),
    ):
        make()
        refused(path, FileFormat.JSONL, "cannot be written")
        partial.unlink()
    assert thesis.read_bytes() == FOREIGN
