"""Parquet files with pyarrow: read in a separate process, written in this one."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import (
    BatchFileError,
    BatchFileUnavailableError,
    InvalidRequestError,
    MissingExtraError,
    RowCode,
)
from nightmill.jobs.formats.csvfile import KINDS, check_columns, index_columns, whole
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_value
from nightmill.jobs.formats.parquet_reader import NOT_UTF8, TOO_LONG, ParquetReader
from nightmill.jobs.formats.rows import FLOATS, RowError
from nightmill.jobs.request.fields import FieldKind

UNREADABLE = {
    TOO_LONG: RowError(RowCode.TOO_LONG, f"has more than {LINE_LIMIT} bytes; shorten or divide its prompt"),
    NOT_UTF8: RowError(RowCode.INVALID_ENCODING, "holds bytes that are not UTF-8; write it anew"),
}
"""The error of a row by the word in its place."""
_ROW_GROUP = 4096  # rows per row group


def read_parquet(
    reader: ParquetReader, label: str, progress: Callable[[float], None]
) -> Iterator[tuple[int, JsonObject | RowError]]:
    """Yield (1-based record number, values by column without nulls), read in a separate process, which ends.

    `label` is the file's name in errors; `progress` is called with the share read.

    Columns are the keys of plain rows: `messages` a list of structs or JSON, `metadata` a struct or JSON.
    Raises BatchFileError for a broken file, unknown columns, and exceeded limits of the reader.
    """
    with reader:
        columns, total = reader.columns()
        index = check_columns(columns, label, index_columns(columns))
        number = 0
        for rows in reader.rows():
            for row in rows:
                number += 1
                yield number, UNREADABLE[row] if isinstance(row, str) else values_of(row, index)
            progress(number / max(total, 1))


def values_of(record: Mapping[str, Any], index: frozenset[str] = frozenset()) -> JsonObject:
    """Return the values of a table's row by column, without nulls and the columns of its `index`."""
    return {
        name: _value(name, value) for name, value in record.items() if value is not None and name not in index
    }


def _value(name: str, value: Any) -> Any:
    kind = KINDS.get(name)
    if kind is FieldKind.INTEGER and isinstance(value, float):
        return whole(value)  # whole numbers with nulls are often stored as floating point
    if name == "custom_id" and isinstance(value, int):
        return str(value)
    if kind in (FieldKind.OBJECT, FieldKind.OBJECTS) and isinstance(value, str):
        try:
            return parse_value(value)
        except InvalidRequestError:
            return value  # the checks of the row report the expected type
    return value


def read_ids(path: Path, columns: Mapping[str, str]) -> Iterator[str] | None:
    """Return the values of the column `id`; None unless this is a Parquet file of exactly these columns."""
    arrow, parquet = pyarrow_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            if not file.schema_arrow.equals(arrow_schema(arrow, columns)):
                return None
    except arrow.ArrowException:
        return None
    return _column(parquet, path, "id")


def _column(parquet: Any, path: Path, name: str) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROW_GROUP, columns=[name]):
            yield from batch.column(0).to_pylist()


class ParquetWriter:
    """A writer of a Parquet file, which can be read once it is closed.

    `columns` names them and their pyarrow types ("string", "int64"); `label` is the file's name in errors.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], label: str) -> None:
        self._arrow, parquet = pyarrow_parquet()
        self._label = label
        self._schema = arrow_schema(self._arrow, columns)
        self._rows: list[JsonObject] = []
        with arrow_errors(self._arrow, label):
            self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[JsonObject]) -> None:
        """Write rows."""
        self._rows += rows
        if len(self._rows) >= _ROW_GROUP:
            self._write_group()

    def _write_group(self) -> None:
        with arrow_errors(self._arrow, self._label):
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        self._write_group()
        with arrow_errors(self._arrow, self._label):
            self._writer.close()

    def discard(self) -> None:
        """Close a file that nobody will read."""
        # The disk may be full, which was reported already.
        with suppress(self._arrow.ArrowException, OSError):
            self._writer.close()
        self._writer.is_open = False  # pyarrow would retry, and complain on stderr


def arrow_schema(arrow: Any, columns: Mapping[str, str]) -> Any:
    """Return the schema of these columns and types."""
    floats = arrow.list_(arrow.float32())
    kinds = (floats if kind == FLOATS else getattr(arrow, kind)() for kind in columns.values())
    return arrow.schema(zip(columns, kinds, strict=True))


def pyarrow_parquet() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet; raises MissingExtraError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"Parquet files need pyarrow: {pip_install('parquet')}") from error
    return pyarrow, pyarrow.parquet


@contextmanager
def arrow_errors(arrow: Any, label: str) -> Iterator[None]:
    """Map the errors of pyarrow in this block to BatchFileError."""
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        # Pyarrow's message for a full disk is long.
        known = error.errno if isinstance(error, OSError) else None
        said = os.strerror(known) if known else str(error).partition("\n")[0]
        # pyarrow raises an OSError without a number for contents that it cannot parse.
        kind = BatchFileUnavailableError if known else BatchFileError
        raise kind(f"{label}: cannot be read or written as Parquet: {said}") from error
