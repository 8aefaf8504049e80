"""Tables of Python programs as sources of a batch: Arrow tables of any library, and iterables of mappings."""

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError, EmptyBatchFileError, InvalidRequestError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, read_objects
from nightmill.jobs.formats.rows import InputRow
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.tables.arrow_files import pyarrow
from nightmill.jobs.tables.columns import Columns, Record, Table, kinds_of
from nightmill.jobs.tables.kinds import kept_value
from nightmill.jobs.tables.options import TableOptions

_ROWS_AT_ONCE = 1024  # as Python's objects


class TableItems:
    """A table of a Python program: anything that speaks Arrow, or an iterable of mappings.

    Raises InvalidRequestError for what is neither, and as `TableFile` does. Its rows can be read once.
    """

    def __init__(self, source: Any, options: TableOptions) -> None:
        if isinstance(source, str | bytes | bytearray | memoryview | Mapping):
            raise _no_table(source)
        if (stream := _arrow_stream(source)) is not None:
            columns = Columns.of_schema(stream.schema, "table")
            self.table = Table(columns, options)
            self._records: Iterable[Record] = _arrow_records(stream, self.table.wanted)
            return
        if not isinstance(source, Iterable):
            raise _no_table(source)
        spooled = _Spooled(source)
        self.table = Table(Columns(spooled.kinds), options)
        self._records = spooled.records()

    def rows(self, defaults: JobSpec) -> Iterator[InputRow]:
        """Every row, its prompt made by the template; `defaults` hold for all."""
        return self.table.rows(self._records, defaults)


def _arrow_stream(source: Any) -> Any:
    """A reader of record batches; None if the source does not speak Arrow."""
    if not hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__arrow_c_array__"):
        if hasattr(source, "to_arrow_reader"):  # DuckDB's relations before they spoke Arrow
            return source.to_arrow_reader()
        return None
    arrow = pyarrow()
    if hasattr(source, "__arrow_c_stream__"):
        try:
            return arrow.RecordBatchReader.from_stream(source)
        except (arrow.ArrowException, TypeError, ValueError) as error:
            raise InvalidRequestError(f"table: is not a table: {error}", field="table") from error
    batch = arrow.record_batch(source)
    return arrow.RecordBatchReader.from_batches(batch.schema, [batch])


def _arrow_records(stream: Any, wanted: list[str]) -> Iterator[Record]:
    from nightmill.jobs.formats import arrow_values

    number = 0
    for batch in stream:
        chosen = batch.select(wanted)
        for at in range(0, len(chosen), _ROWS_AT_ONCE):
            for row in arrow_values.rows_of(arrow_values.friendly(chosen.slice(at, _ROWS_AT_ONCE))):
                number += 1
                yield number, row


class _Spooled:
    """An iterable of mappings on the disk, so that its columns are known before its first row is entered."""

    def __init__(self, items: Iterable[Any]) -> None:
        with _disk():
            self._file = tempfile.TemporaryFile("w+b", prefix="nightmill-")  # noqa: SIM115 - closed with its last reader
        self._rows = 0
        self.kinds = kinds_of(self._written(items), "table")
        if not self._rows:
            raise EmptyBatchFileError("table: holds no rows; give a mapping of columns to values for each")
        with _disk():
            self._file.flush()

    def records(self) -> Iterator[Record]:
        """The rows, read once."""
        with self._file as file:
            file.seek(0)
            yield from read_objects(file, 4 * LINE_LIMIT)

    def _written(self, items: Iterable[Any]) -> Iterator[JsonObject]:
        for number, item in enumerate(items, 1):
            if not isinstance(item, Mapping):
                said = f"table: row {number} is {json_type(item)}; give mappings of columns to values"
                raise InvalidRequestError(said, field="table")
            row = {str(name): json_value(value) for name, value in item.items()}
            try:
                line = json.dumps(row, ensure_ascii=True, default=plain_value)
            except (TypeError, ValueError, RecursionError) as error:
                said = f"table: row {number} cannot be written as JSON: {error}"
                raise InvalidRequestError(said, field="table") from None
            with _disk():
                self._file.write(line.encode() + b"\n")
            self._rows = number
            yield json.loads(line)


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchFileError(
            f"table: its rows cannot be kept in {tempfile.gettempdir()} (TMPDIR), which must have room for "
            f"all: {error.strerror or error}"
        ) from error


def json_value(value: Any) -> Any:
    """A value without numbers that JSON has not: what is not a number is how frames say that nothing is."""
    return None if isinstance(value, float) and math.isnan(value) else kept_value(value)


def plain_value(value: Any) -> Any:
    """Convert a value that JSON does not have to one that it has. Raises TypeError for others."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, type):  # NumPy's numbers
        return value.item()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a value of a table")


def _no_table(source: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"table: {type(source).__name__} is not a table; give a path, an iterable of mappings, or a table "
        "that speaks Arrow, such as of pandas, Polars, DuckDB or pyarrow",
        field="table",
    )
