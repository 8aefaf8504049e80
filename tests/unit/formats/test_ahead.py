"""Processes that read files before their turn: how many there are, and that none is left."""

from contextlib import closing
from typing import cast

import pytest

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.ahead import readers_ahead
from nightmill.jobs.formats.parquet_reader import ParquetReader


class Files:
    """Files that say which of their processes are there."""

    def __init__(self, *names: str) -> None:
        self.parts = [File(name, self) for name in names]
        self.open: list[str] = []


class File:
    """A file with a process for a reader, unless its name says otherwise."""

    def __init__(self, name: str, files: Files) -> None:
        self.name, self._files = name, files

    def reader_of_rows(self) -> ParquetReader | None:
        if self.name == "gone":
            raise BatchFileError("gone: there is no such file")
        if self.name == "text":
            return None
        self._files.open.append(self.name)
        return cast(ParquetReader, self)

    def close(self) -> None:
        if self.name in self._files.open:
            self._files.open.remove(self.name)


def test_those_of_the_next_files_are_there_and_no_more() -> None:
    files = Files("a", "b", "c", "d", "e")
    seen = [
        (part.name, list(files.open))
        for part, _ in zip(files.parts, readers_ahead(files.parts, 2), strict=True)
    ]
    assert seen == [
        ("a", ["a", "b", "c"]),
        ("b", ["b", "c", "d"]),
        ("c", ["c", "d", "e"]),
        ("d", ["d", "e"]),
        ("e", ["e"]),
    ]
    assert files.open == []


def test_a_file_without_one_is_left_to_its_turn() -> None:
    files = Files("a", "gone", "text", "b")
    readers = [cast(File | None, reader) for reader in readers_ahead(files.parts, 1)]
    assert [reader and reader.name for reader in readers] == ["a", None, None, "b"]
    assert files.open == []


@pytest.mark.parametrize("taken", [1, 2, 4])
def test_none_is_left_where_the_rest_is_not_wanted(taken: int) -> None:
    files = Files("a", "b", "c", "d")
    with closing(readers_ahead(files.parts, 2)) as readers:
        for _ in range(taken):
            next(readers)
        assert files.open[0] == "abcd"[taken - 1]
    assert files.open == []
