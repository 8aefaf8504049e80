"""Writing of result and error files in groups of rows, so that a crash leaves complete rows.

JSONL and CSV grow as rows come; a truncated last row is removed when the file is opened for appending.
Parquet cannot grow, and is readable only once it is closed. `jobs.formats.destination` decides which files
may be written, and renames complete ones.
"""

import csv
import errno
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT
from nightmill.jobs.formats.layout import Layout, WholeWriter
from nightmill.jobs.formats.rows import FileFormat

_GROUP = 64  # rows written at once
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ResultFile:
    """A file of rows of a layout, by default of those made by `result_row` or (`errors`) by `error_row`.

    `append`: append to an existing file instead of emptying it. `label`: its name in errors. Raises
    BatchFileError if it cannot be written. As a context manager, it is closed at the end.
    """

    def __init__(
        self,
        path: str | Path,
        format: FileFormat,
        *,
        errors: bool = False,
        append: bool = False,
        label: str | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.path = Path(path)
        self._label = label or str(path)
        self.format = format
        self._layout = layout or Layout(format, errors)
        self._rows: list[JsonObject] = []
        self._head = b""
        self._whole_file: WholeWriter | None = None
        if not self._layout.grows:
            if append:
                raise BatchFileError(f"{self._label}: a Parquet file cannot be appended to; write it anew")
            self._whole_file = self._layout.writer(self.path, self._label)
            return
        with writing(self._label):
            self._file = self.path.open("r+b" if append and self.path.exists() else "w+b", buffering=0)
            self._file.seek(self._whole())
            self._file.truncate()
            if self._file.tell() == 0:
                # Written with the first rows, as the disk may be full now.
                self._head = self._layout.head()

    def ids(self) -> set[str]:
        """Return the job ids of the rows in the file, without unflushed ones."""
        if not self._layout.grows:
            return set()
        name = self._layout.id_column
        with writing(self._label), self.path.open(encoding="utf-8-sig", newline="") as file:
            if self.format is FileFormat.CSV:
                csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
                return {row[name] for row in csv.DictReader(file, delimiter=self._layout.dialect.delimiter)}
            return {json.loads(line)[name] for line in file}

    def write(self, row: JsonObject) -> None:
        """Append a row; it is written once its group is full, or at `flush`."""
        self._rows.append(row)
        if len(self._rows) >= _GROUP:
            self.flush()

    def flush(self) -> None:
        """Write all rows to the operating system; rejected ones stay buffered."""
        if self._whole_file is not None:
            rows, self._rows = self._rows, []
            self._whole_file.write(rows)
            return
        lines = list(map(self._layout.line, self._rows))
        with writing(self._label):
            whole = self._file.tell()
            left = memoryview(self._head + b"".join(lines))
            try:
                while left:  # a write may be partial
                    left = left[self._file.write(left) :]
            except OSError:  # for example a full disk: let the file end with a complete row
                self._file.seek(whole)
                self._file.truncate()
                raise
        self._rows, self._head = [], b""

    def close(self) -> None:
        """Write the remaining rows and sync the file to disk; repeating it does nothing."""
        if self._whole_file is None and self._file.closed:
            return
        self.flush()
        if self._whole_file is not None:
            self._whole_file.close()
            return
        with writing(self._label):
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Close a file that nobody will read, without writing more."""
        self._rows = []
        if self._whole_file is not None:
            self._whole_file.discard()
        else:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._whole_file is not None:
            self.discard()
        else:
            self.close()

    def _whole(self) -> int:
        """Return the number of bytes up to the end of the last complete row."""
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
def writing(label: str) -> Iterator[None]:
    """Map the system's errors in this block to BatchFileError, for a full disk to its temporary kind."""
    try:
        yield
    except OSError as error:
        said = f"{label}: cannot be written: {error.strerror or error}"
        raise (BatchFileUnavailableError if error.errno in _FULL else BatchFileError)(said) from error
