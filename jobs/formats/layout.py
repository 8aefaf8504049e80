"""The layout of results or errors in a file: the columns of a row, and its form in each format."""

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Protocol

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.dialect import BYTE_ORDER_MARK, Dialect
from nightmill.jobs.formats.parquet import ParquetWriter, read_ids
from nightmill.jobs.formats.results import (
    ERROR_COLUMNS,
    LATER,
    READ,
    RESULT_COLUMNS,
    error_row,
    result_row,
)
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.reply.job import Job

_USUAL = Dialect()
_OPENAI_KEYS = {"id", "custom_id", "response", "error"}
_SOMETIMES = {"answers", *READ, *LATER}
_RESULT_KEYS = RESULT_COLUMNS.keys() - _SOMETIMES
_ERROR_KEYS = {"custom_id", "id", "line", "error", "text"} | _SOMETIMES


class WholeWriter(Protocol):
    """Writes a file that can be read once it is closed, and not before."""

    def write(self, rows: Sequence[JsonObject]) -> None:
        """Add rows."""
        ...

    def close(self) -> None:
        """Write the rest."""
        ...

    def discard(self) -> None:
        """Let go of the file, which nobody will read."""
        ...


class Layout:
    """Rows of results, or of errors, in a format. Others have other columns, and the same methods.

    columns    of tables, and their types
    dialect    of CSV
    added      those that files of earlier versions lack, in the order in which they came
    id_column  the key, or the column, of jobs' ids
    """

    id_column = "id"

    def __init__(self, format: FileFormat, errors: bool = False, dialect: Dialect = _USUAL) -> None:
        self.format = format
        self.dialect = dialect
        self.errors = errors
        self.columns: Mapping[str, str] = ERROR_COLUMNS if errors else RESULT_COLUMNS
        self.added: tuple[str, ...] = () if errors else LATER

    def known_columns(self) -> Iterator[dict[str, str]]:
        """Yield the columns that a file of this layout may have: those of today, then those of before."""
        for count in range(len(self.added), -1, -1):
            lacking = self.added[count:]
            yield {name: kind for name, kind in self.columns.items() if name not in lacking}

    @property
    def grows(self) -> bool:
        """True if rows can be appended to a file of this format."""
        return self.format not in (FileFormat.PARQUET, FileFormat.ARROW)

    def row(self, job: Job) -> JsonObject:
        """A job that has ended as a row."""
        return error_row(job, self.format) if self.errors else result_row(job, self.format)

    def writer(self, path: Path, label: str) -> WholeWriter:
        """Make the writer of a file that does not grow."""
        return ParquetWriter(path, self.columns, label)

    def read_ids(self, path: Path) -> Iterator[str] | None:
        """The job ids of a file that does not grow; None if its columns are others."""
        found = (read_ids(path, columns) for columns in self.known_columns())
        return next((ids for ids in found if ids is not None), None)

    def narrow(self, there: Collection[str]) -> list[str]:
        """Leave out columns that tables of earlier versions lack; returns others that this one lacks."""
        later = self.added
        self.columns = {
            name: kind for name, kind in self.columns.items() if name in there or name not in later
        }
        return [name for name in self.columns if name not in there]

    def adopt(self, head: Callable[[int], bytes]) -> bool:
        """Return True if a CSV file begins with the names of these columns, or an earlier version's.

        Such an older file keeps its columns, also for rows that are added to it, and any file its dialect.

        head  returns so many bytes of the file's beginning
        """
        for dialect, columns in product(self.dialect.or_others(), tuple(self.known_columns())):
            expected = _csv_head(columns, dialect).rstrip(b"\r\n")
            after = head(len(expected) + 2)[len(expected) :]
            if head(len(expected)) == expected and after[:1] in (b"", b"\n", b"\r"):
                self.columns, self.dialect = columns, dialect
                return True
        return False

    def head(self) -> bytes:
        """The beginning of a file that grows, before its rows: in CSV the names of columns, else empty."""
        return _csv_head(self.columns, self.dialect) if self.format is FileFormat.CSV else b""

    def line(self, row: JsonObject) -> bytes:
        """A row of a file that grows."""
        if self.format is FileFormat.CSV:
            return csv_line((row.get(name) for name in self.columns), self.dialect)
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"

    def owns(self, row: JsonObject) -> bool:
        """True if an object of a JSON file is a row that this layout wrote."""
        if not isinstance(row.get(self.id_column), str):
            return False
        if self.format is FileFormat.OPENAI:
            return row.keys() == _OPENAI_KEYS and (row["error"] is not None) == self.errors
        if self.errors:
            return "error" in row and row.keys() <= _ERROR_KEYS
        return row.keys() - _SOMETIMES == _RESULT_KEYS


def csv_line(cells: Iterable[object], dialect: Dialect) -> bytes:
    """A line of CSV."""
    line = io.StringIO()
    csv.writer(line, delimiter=dialect.delimiter).writerow(cells)
    return line.getvalue().encode()


def _csv_head(columns: Iterable[str], dialect: Dialect) -> bytes:
    return (BYTE_ORDER_MARK if dialect.mark else b"") + csv_line(columns, dialect)
