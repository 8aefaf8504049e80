"""Result and error files: rows appended in groups, so that what is on disk after a crash is whole rows.

JSONL and CSV grow as rows come; a last row that a crash cut in two is removed when the file is opened to be
appended to. Parquet cannot grow, and is a file only once it is closed. Which files may be written, and how
one appears under its name when it is whole, is in `jobs.formats.destination`.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.parquet import ParquetWriter
from nightmill.jobs.formats.results import ERROR_COLUMNS, RESULT_COLUMNS
from nightmill.jobs.formats.rows import FileFormat

_GROUP = 64  # rows written at once


class ResultFile:
    """A file of rows made by `result_row` or (`errors`) by `error_row`.

    `append`: go on with a file that is there, in place of emptying it. `label`: its name in errors. Raises
    BatchFileError if it cannot be written. As a context manager it is closed at the end.
    """

    def __init__(
        self,
        path: str | Path,
        format: FileFormat,
        *,
        errors: bool = False,
        append: bool = False,
        label: str | None = None,
    ) -> None:
        self.path = Path(path)
        self._label = label or str(path)
        self.format = format
        self._columns = ERROR_COLUMNS if errors else RESULT_COLUMNS
        self._rows: list[JsonObject] = []
        self._parquet: ParquetWriter | None = None
        if format is FileFormat.PARQUET:
            if append:
                raise BatchFileError(f"{self._label}: a Parquet file cannot be appended to; write it anew")
            self._parquet = ParquetWriter(self.path, self._columns, self._label)
            return
        with self._errors():
            self._file = self.path.open("r+b" if append and self.path.exists() else "w+b", buffering=0)
            self._file.seek(self._whole())
            self._file.truncate()
            if format is FileFormat.CSV and self._file.tell() == 0:
                self._file.write(_csv_line(self._columns))

    def ids(self) -> set[str]:
        """The job ids of the rows that the file holds, those that are not flushed left out."""
        if self.format is FileFormat.PARQUET:
            return set()
        with self._errors(), self.path.open(encoding="utf-8", newline="") as file:
            if self.format is FileFormat.CSV:
                return {row["id"] for row in csv.DictReader(file)}
            return {json.loads(line)["id"] for line in file}

    def write(self, row: JsonObject) -> None:
        """Append a row; it is on its way to the disk once its group is full, or at `flush`."""
        self._rows.append(row)
        if len(self._rows) >= _GROUP:
            self.flush()

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        rows, self._rows = self._rows, []
        if self._parquet is not None:
            self._parquet.write(rows)
            return
        if self.format is FileFormat.CSV:
            lines = [_csv_line(row.get(name) for name in self._columns) for row in rows]
        else:
            lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
        with self._errors():
            whole = self._file.tell()
            left = memoryview(b"".join(lines))
            try:
                while left:  # a write to a file may take a part only
                    left = left[self._file.write(left) :]
            except OSError:  # the disk is full, say: let the file end with a whole row
                self._file.seek(whole)
                self._file.truncate()
                raise

    def close(self) -> None:
        """Write what is left, and wait until it is on the disk."""
        self.flush()
        if self._parquet is not None:
            self._parquet.close()
            return
        with self._errors():
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Let go of a file that nobody will read: write nothing more."""
        self._rows = []
        if self._parquet is not None:
            self._parquet.discard()
        else:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._parquet is not None:
            self.discard()
        else:
            self.close()

    def _whole(self) -> int:
        """Bytes up to the end of the last whole row."""
        end = whole = 0
        inside_quotes = False
        for line in io.BufferedReader(io.FileIO(self._file.fileno(), closefd=False)):
            end += len(line)
            # Quotes within a quoted cell are doubled, so an odd number opens or closes one.
            inside_quotes ^= self.format is FileFormat.CSV and line.count(b'"') % 2 == 1
            if line.endswith(b"\n") and not inside_quotes:
                whole = end
        return whole

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchFileError(f"{self._label}: cannot be written: {error.strerror or error}") from error


def _csv_line(cells: Iterable[object]) -> bytes:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue().encode()
