"""Files that are tables, as sources of a batch: their columns, and their rows as prompts."""

import base64
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError, EmptyBatchFileError
from nightmill.jobs.formats.csvfile import UTF_16_AS_UTF8, dialect_of, index_columns, read_cells, say_ignored
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.inputs import NOTHING_SAID, InputFile
from nightmill.jobs.formats.jsonlines import read_objects
from nightmill.jobs.formats.parquet import UNREADABLE
from nightmill.jobs.formats.parquet_reader import PROGRAM, Expansion, ParquetReader
from nightmill.jobs.formats.rows import FileFormat, InputRow, RowError
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.tables.arrow_files import pyarrow
from nightmill.jobs.tables.columns import Columns, Record, Table, check_names, kinds_of
from nightmill.jobs.tables.kinds import TEXT
from nightmill.jobs.tables.options import TableOptions

_PROGRAM = PROGRAM.with_name("table_process.py")
_ARROW_SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class TableFile(InputFile):
    """A file that is a table: CSV, TSV, Parquet, Arrow, or JSON lines, one object for each row.

    Raises BatchFileError, also for columns without a name or with one that is there twice, and
    InvalidParameterError for a template that names a column which is not there.
    """

    formats = tuple(FileFormat)

    def __init__(
        self,
        path: str | Path,
        format: FileFormat | None = None,
        *,
        options: TableOptions,
        label: str | None = None,
        name: str | None = None,
        partition: Mapping[str, str | None] | None = None,
    ) -> None:
        """Open a file.

        partition  columns that the names of its folders give, with their value in all rows; one that the file
                   has itself is the file's
        """
        super().__init__(path, format, label=label, name=name)
        if self.format is FileFormat.OPENAI:
            self.format = FileFormat.JSONL
        with self._errors():
            columns = self._columns()
            self._partition = {
                key: value for key, value in (partition or {}).items() if key not in columns.kinds
            }
            self.table = Table(columns.beside(self._partition), options)

    def rows(self, defaults: JobSpec = NOTHING_SAID) -> Iterator[InputRow]:
        """Every row, its prompt made by the template; `defaults` hold for all."""
        self._position = 0
        read = 0

        def records() -> Iterator[Record]:
            nonlocal read
            for record in self._records():
                read += 1
                yield record

        found = 0
        for row in self.table.rows(records(), defaults):
            found += 1
            yield row
        if not read:
            raise EmptyBatchFileError(f"{self.label}: holds no rows; write one row on each line")
        if not found:
            raise EmptyBatchFileError(
                f"{self.label}: each of its {read:,} rows lacks a value, and is left out"
            )

    def reader_of_rows(self) -> ParquetReader | None:
        """Start the process that reads the rows of a Parquet or Arrow file, which whoever gets it ends."""
        if not self._typed:
            return None
        return self._reader([name for name in self.table.wanted if name not in self._partition])

    def _records(self, reader: ParquetReader | None = None) -> Iterator[Record]:
        for number, record in self._own_records(reader or self.reader_of_rows()):
            yield number, record if isinstance(record, RowError) else {**record, **self._partition}

    def _own_records(self, reader: ParquetReader | None) -> Iterator[Record]:
        if reader is not None:
            yield from self._typed_records(reader)
            return
        with self._errors(), self._open() as stream:
            if self.format is FileFormat.JSONL:
                yield from read_objects(stream)
                return
            text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
            names, records = read_cells(text, self.label, self._delimiter)
            for number, cells in records:
                if isinstance(cells, RowError):
                    yield number, cells
                else:
                    yield number, {name: cell for name, cell in zip(names, cells, strict=True) if cell != ""}

    def _typed_records(self, reader: ParquetReader) -> Iterator[Record]:
        with reader:
            total = int(reader.header()["rows"])
            number = 0
            for rows in reader.rows():
                for row in rows:
                    number += 1
                    yield number, UNREADABLE[row] if isinstance(row, str) else dict(row)
                if total > 0:
                    self._note_share(number / total)

    def _reader(self, wanted: list[str] | None) -> ParquetReader:
        """Start reading columns of a typed file, or its schema alone."""
        what = "Arrow" if self.format is FileFormat.ARROW else "Parquet"
        return ParquetReader(
            self.path, self.label, Expansion(), _PROGRAM, {"columns": wanted}, described=what
        )

    @property
    def _typed(self) -> bool:
        return self.format in (FileFormat.PARQUET, FileFormat.ARROW)

    @property
    def _delimiter(self) -> str | None:
        return "\t" if self._name.lower().removesuffix(".gz").endswith(".tsv") else None

    def _dialect(self, stream: BinaryIO) -> Dialect:
        return dialect_of(stream, self._delimiter, of_prompts=False)

    def _columns(self) -> Columns:
        if self._typed:
            with self._reader(None) as reader:
                schema = base64.b64decode(reader.header()["schema"])
            arrow = pyarrow()
            columns = Columns.of_schema(arrow.ipc.read_schema(arrow.py_buffer(schema)), self.label)
            say_ignored(self.label, columns.index)
            return columns
        if self.format is FileFormat.CSV:
            return self._csv_columns()
        with self._open() as stream:
            return Columns(self._json_kinds(stream))

    def _json_kinds(self, stream: BinaryIO) -> dict[str, str]:
        """Kinds by column of JSON lines. Raises BatchFileError if no line can be read."""
        fault: RowError | None = None
        count = 0

        def records() -> Iterator[JsonObject | RowError]:
            nonlocal fault, count
            for number, record in read_objects(stream):
                count = number
                if fault is None and isinstance(record, RowError):
                    fault = replace(
                        record, message=f"line {number} {record.message.removeprefix('the line ')}"
                    )
                yield record

        kinds = kinds_of(records(), self.label)
        if not count:
            raise EmptyBatchFileError(f"{self.label}: holds no rows; write one row on each line")
        if not kinds:
            said = "its objects have no keys" if fault is None else fault.message
            raise BatchFileError(f"{self.label}: holds no row that can be read; {said}")
        return kinds

    def _csv_columns(self) -> Columns:
        with self._open() as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
            names, _ = read_cells(text, self.label, self._delimiter)
            text.detach()
        index = index_columns(names, text=True)
        kept = [name for name in names if name not in index]
        check_names(kept, self.label)
        say_ignored(self.label, index)
        return Columns(dict.fromkeys(kept, TEXT), index=index)

    def _table_format(self, start: bytes) -> FileFormat | None:
        name = self._name.lower().removesuffix(".gz")
        if start.startswith(_UTF16):
            raise BatchFileError(f"{self.label}: is UTF-16; {UTF_16_AS_UTF8}")
        if name.endswith(_ARROW_SUFFIXES):
            return FileFormat.ARROW
        return super()._table_format(start)
