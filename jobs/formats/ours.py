"""Which jobs a result or error file is about; any other file is told apart by its first foreign row."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, read_objects
from nightmill.jobs.formats.parquet import read_ids
from nightmill.jobs.formats.results import ERROR_COLUMNS, READ, RESULT_COLUMNS
from nightmill.jobs.formats.rows import FileFormat

_OPENAI_KEYS = {"id", "custom_id", "response", "error"}
_SOMETIMES = {"answers", *READ}
_RESULT_KEYS = RESULT_COLUMNS.keys() - _SOMETIMES
_ERROR_KEYS = {"custom_id", "id", "line", "error", "text"} | _SOMETIMES


class ForeignFileError(Exception):
    """The file holds something else than rows of this kind. Never leaves this package."""


def job_ids(path: Path, format: FileFormat, *, errors: bool) -> Iterator[str]:
    """The job ids of a file of `result_row`s or (`errors`) of `error_row`s, in bounded memory.

    A file without rows has none. A last row that a crash cut in two is passed over. Raises ForeignFileError
    if any other row, column or key is in it, and OSError.
    """
    columns = ERROR_COLUMNS if errors else RESULT_COLUMNS
    if path.stat().st_size == 0:
        return
    if format is FileFormat.PARQUET:
        found = read_ids(path, columns)
        if found is None:
            raise ForeignFileError
        yield from found
    elif format is FileFormat.CSV:
        yield from _csv_ids(path, list(columns))
    else:
        yield from _json_ids(path, format, errors=errors)


def _json_ids(path: Path, format: FileFormat, *, errors: bool) -> Iterator[str]:
    rows, torn = 0, False
    with path.open("rb") as file:
        for _, row in read_objects(file):
            if torn or (isinstance(row, dict) and not _is_row(row, format, errors=errors)):
                raise ForeignFileError
            if isinstance(row, dict):
                rows += 1
                yield row["id"]
            else:
                torn = True  # which only the last row may be
    if not rows or (torn and _ends_in_newline(path)):
        raise ForeignFileError


def _is_row(row: JsonObject, format: FileFormat, *, errors: bool) -> bool:
    if not isinstance(row.get("id"), str):
        return False
    if format is FileFormat.OPENAI:
        return row.keys() == _OPENAI_KEYS and (row["error"] is not None) == errors
    if errors:
        return "error" in row and row.keys() <= _ERROR_KEYS
    return row.keys() - _SOMETIMES == _RESULT_KEYS


def _csv_ids(path: Path, columns: list[str]) -> Iterator[str]:
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
    with path.open("rb") as file:
        if file.readline(LINE_LIMIT).rstrip(b"\r\n") != ",".join(columns).encode():
            raise ForeignFileError
        try:
            for cells in csv.reader(_whole_records(file), strict=True):
                if len(cells) != len(columns):
                    raise ForeignFileError
                yield cells[columns.index("id")]
        except csv.Error:
            raise ForeignFileError from None


def _whole_records(file: BinaryIO) -> Iterator[str]:
    """The lines of each record, once its end is seen."""
    record: list[bytes] = []
    quotes = 0
    for line in file:
        record.append(line)
        quotes += line.count(b'"')  # those within quoted cells are doubled
        if quotes % 2 == 0 and line.endswith(b"\n"):
            yield from (line.decode(errors="replace") for line in record)
            record = []


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
