"""Parquet in and out, with pyarrow: rows come from a process of its own, results are written in this one."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import (
    BatchFileError,
    BatchFileUnavailableError,
    InvalidRequestError,
    MissingExtraError,
    RowCode,
)
from nightmill.jobs.fields import Kind
from nightmill.jobs.formats.csvfile import KINDS, check_columns, whole
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_value
from nightmill.jobs.formats.parquet_reader import NOT_UTF8, TOO_LONG, Expansion, ParquetReader
from nightmill.jobs.formats.rows import RowError

_UNREADABLE = {
    TOO_LONG: RowError(RowCode.TOO_LONG, f"has more than {LINE_LIMIT} bytes; shorten or divide its prompt"),
    NOT_UTF8: RowError(RowCode.INVALID_ENCODING, "holds bytes that are not UTF-8; write it anew"),
}
_ROW_GROUP = 4096  # written at once


def read_parquet(
    path: Path, label: str, progress: Callable[[float], None], expansion: Expansion
) -> Iterator[tuple[int, JsonObject | RowError]]:
    """(1-based record number, its values by column; nulls left out), read in a process of its own.

    `label` is the file's name in errors, `progress` is told the share read.

    Columns are the keys of plain rows: `messages` a list of structs or JSON, `metadata` a struct or JSON.
    Raises BatchFileError for a broken file, other columns and what `expansion` does not allow;
    MissingExtraError without pyarrow.
    """
    with ParquetReader(path, label, expansion) as reader:
        columns, total = reader.columns()
        check_columns(columns, label)
        number = 0
        for rows in reader.rows():
            for row in rows:
                number += 1
                yield number, _UNREADABLE[row] if isinstance(row, str) else values_of(row)
            progress(number / max(total, 1))


def values_of(record: Mapping[str, Any]) -> JsonObject:
    """The values of a table's row, by column; nulls are left out."""
    return {name: _value(name, value) for name, value in record.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    kind = KINDS.get(name)
    if kind is Kind.INTEGER and isinstance(value, float):
        return whole(value)  # a column of whole numbers with gaps is often stored as floating point
    if name == "custom_id" and isinstance(value, int):
        return str(value)
    if kind in (Kind.OBJECT, Kind.OBJECTS) and isinstance(value, str):
        try:
            return parse_value(value)
        except InvalidRequestError:
            return value  # the checks of the row say what belongs there
    return value


def read_ids(path: Path, columns: Mapping[str, str]) -> Iterator[str] | None:
    """The values of the column `id`; None if this is not a Parquet file of exactly these columns."""
    arrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            if not file.schema_arrow.equals(_schema(arrow, columns)):
                return None
    except arrow.ArrowException:
        return None
    return _column(parquet, path, "id")


def _column(parquet: Any, path: Path, name: str) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROW_GROUP, columns=[name]):
            yield from batch.column(0).to_pylist()


class ParquetWriter:
    """Rows into a Parquet file, which can be read once it is closed.

    `columns` names them and their pyarrow types ("string", "int64"); `label` is the file's name in errors.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], label: str) -> None:
        self._arrow, parquet = _pyarrow()
        self._label = label
        self._schema = _schema(self._arrow, columns)
        self._rows: list[JsonObject] = []
        with _errors(self._arrow, label):
            self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[JsonObject]) -> None:
        """Add rows."""
        self._rows += rows
        if len(self._rows) >= _ROW_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        with _errors(self._arrow, self._label):
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Write the rest."""
        self._write_group()
        with _errors(self._arrow, self._label):
            self._writer.close()

    def discard(self) -> None:
        """Let go of the file, which nobody will read."""
        with suppress(self._arrow.ArrowException, OSError):  # the disk may be full: that was said already
            self._writer.close()
        self._writer.is_open = False  # pyarrow would try once more, and complain on stderr


def _schema(arrow: Any, columns: Mapping[str, str]) -> Any:
    return arrow.schema([(name, getattr(arrow, kind)()) for name, kind in columns.items()])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'nightmill[parquet]'") from error
    return pyarrow, pyarrow.parquet


@contextmanager
def _errors(arrow: Any, label: str) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        known = error.errno if isinstance(error, OSError) else None  # a full disk is told with many words
        said = os.strerror(known) if known else str(error).partition("\n")[0]
        # pyarrow raises an OSError without a number for contents that it does not understand.
        kind = BatchFileUnavailableError if known else BatchFileError
        raise kind(f"{label}: cannot be read or written as Parquet: {said}") from error
