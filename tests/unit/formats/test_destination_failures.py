"""What is left of a destination that cannot be finished: what was there, and whole rows."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat
from tests.unit.formats.destinations import (
    FOREIGN,
    FORMATS,
    named,
    names,
    rows,
    vetted,
    write,
)


@contextmanager
def full_disk(at: int) -> Iterator[None]:
    """No file of this process grows beyond `at` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, format: FileFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(named(tmp_path, format), format, rows(format, range(9)))
    before = path.read_bytes()
    long = [rows(format, range(n, n + 1), text=os.urandom(2000).hex())[0] for n in range(200)]
    with (
        full_disk(100_000),
        pytest.raises(BatchFileError) as caught,
        vetted(path, format) as destination,
        destination.replace() as file,
    ):
        for row in long:
            file.write(row)
    assert str(caught.value).startswith(f"{path}: cannot be ") and "too large" in str(caught.value)
    assert path.read_bytes() == before
    assert names(tmp_path) == [path.name]
    del caught
    assert capfd.readouterr().err == ""  # nor does anything complain later


@pytest.mark.parametrize("format", FORMATS)
def test_an_exception_leaves_what_was_there_and_nothing_else(tmp_path: Path, format: FileFormat) -> None:
    path = named(tmp_path, format)
    with (
        pytest.raises(KeyboardInterrupt),
        vetted(path, format) as destination,
        destination.replace() as file,
    ):
        file.write(rows(format, range(1))[0])
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize("format", [FileFormat.OPENAI, FileFormat.JSONL, FileFormat.CSV])
def test_a_growing_file_ends_with_a_whole_row_where_the_disk_is_full(
    tmp_path: Path, format: FileFormat
) -> None:
    path = named(tmp_path, format)
    long = rows(format, range(3), text="y" * 40_000)
    with vetted(path, format) as destination:
        file = destination.grow()
        file.write(long[0])
        file.flush()
        whole = path.read_bytes()
        file.write(long[1])
        with full_disk(60_000), pytest.raises(BatchFileError, match="cannot be written: File too large"):
            file.flush()
        assert path.read_bytes() == whole
        file.discard()
    assert names(tmp_path) == [path.name]
    with vetted(path, format) as destination, destination.grow() as file:  # there is room again
        assert file.ids() == {long[0]["id"]}
        file.write(long[1])
    assert path.read_bytes().startswith(whole)


def test_other_names_of_a_file_that_is_begun_anew_keep_its_content(tmp_path: Path) -> None:
    path, backup = tmp_path / "out.jsonl", tmp_path / "backup.jsonl"
    path.write_bytes(FOREIGN)
    os.link(path, backup)
    with vetted(path, FileFormat.JSONL, overwrite=True) as destination, destination.grow() as file:
        file.write(rows(FileFormat.JSONL, range(1))[0])
    assert backup.read_bytes() == FOREIGN


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"none/out\.jsonl: there is no folder .*/none: make it"):
        Destination(tmp_path / "none" / "out.jsonl", FileFormat.JSONL)
    with pytest.raises(BatchFileError, match="cannot be written: Not a directory"):
        (tmp_path / "file").touch()
        Destination(tmp_path / "file" / "out.jsonl", FileFormat.JSONL)
