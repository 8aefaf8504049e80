"""Recognition of result and error files: reads their job ids, and stops at the first foreign row."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.formats.jsonlines import LINE_LIMIT, read_objects
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.formats.rows import FileFormat


class ForeignFileError(Exception):
    """The file contains other things than rows of this kind. Never leaves this package."""


def job_ids(path: Path, format: FileFormat, *, errors: bool, layout: Layout | None = None) -> Iterator[str]:
    """Yield the job ids of a file of `result_row`s or (`errors`) of `error_row`s, in bounded memory.

    A last row that a crash truncated is skipped. Raises ForeignFileError if the file has any other row,
    column or key, and OSError.

    layout  of rows that are others
    """
    layout = layout or Layout(format, errors)
    if path.stat().st_size == 0:
        return
    if not layout.grows:
        found = layout.read_ids(path)
        if found is None:
            raise ForeignFileError
        yield from found
    elif format is FileFormat.CSV:
        yield from _csv_ids(path, layout)
    else:
        yield from _json_ids(path, layout)


def _json_ids(path: Path, layout: Layout) -> Iterator[str]:
    rows, torn = 0, False
    with path.open("rb") as file:
        for _, row in read_objects(file):
            if torn or (isinstance(row, dict) and not layout.owns(row)):
                raise ForeignFileError
            if isinstance(row, dict):
                rows += 1
                yield row[layout.id_column]
            else:
                torn = True  # allowed for the last row only
    if not rows or (torn and _ends_in_newline(path)):
        raise ForeignFileError


def _csv_ids(path: Path, layout: Layout) -> Iterator[str]:
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
    with path.open("rb") as file:

        def beginning(length: int) -> bytes:
            file.seek(0)
            return file.read(length)

        if not layout.adopt(beginning):
            raise ForeignFileError
        columns = list(layout.columns)
        beginning(len(layout.head().rstrip(b"\r\n")))
        if file.readline(3) not in (b"\r\n", b"\n", b""):
            raise ForeignFileError
        try:
            for cells in csv.reader(_whole_records(file), delimiter=layout.dialect.delimiter, strict=True):
                if len(cells) != len(columns):
                    raise ForeignFileError
                yield cells[columns.index(layout.id_column)]
        except csv.Error:
            raise ForeignFileError from None


def _whole_records(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of each complete record."""
    record: list[bytes] = []
    quotes = 0
    for line in file:
        record.append(line)
        quotes += line.count(b'"')  # quotes within quoted cells are doubled
        if quotes % 2 == 0 and line.endswith(b"\n"):
            yield from (line.decode(errors="replace") for line in record)
            record = []


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
