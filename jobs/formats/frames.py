"""Tables of Python programs as rows, and results as tables. pandas and pyarrow are imported only when needed.

An Arrow table is any object with an Arrow C stream
(https://arrow.apache.org/docs/format/CStreamInterface.html), such as those of pyarrow and DuckDB. Tables of
pandas and Polars are read without pyarrow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol

from nightmill.jobs.base.contract import JsonObject, Prompt
from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import InvalidRequestError, MissingExtraError
from nightmill.jobs.formats.csvfile import column_fault, index_columns, say_ignored
from nightmill.jobs.formats.parquet import arrow_schema, values_of

_ROWS = 1024  # rows converted to Python objects at once

_DTYPES = {"int64": "Int64", "float64": "Float64"}  # of columns that may have no value in a row


class ArrowTable(Protocol):
    """A table of any library that supports Arrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the table as a PyCapsule."""


Prompts = Iterable[Prompt | Mapping[str, Any]] | ArrowTable
"""Many prompts: an iterable of prompts and rows, or a table."""


def items_of(source: Any, columns: frozenset[str]) -> Iterator[Any]:
    """Yield the items of an iterable, or the rows of a table as mappings, whose columns must be in `columns`.

    Raises InvalidRequestError, before the first row, for a single text or mapping, other columns, and a
    source that is not iterable; MissingExtraError for an Arrow table without pyarrow.
    """
    if isinstance(source, str | bytes | bytearray | memoryview | Mapping):
        raise InvalidRequestError(
            f"prompts: is a single {type(source).__name__}; give an iterable of prompts or rows, such as a "
            "list, or a table",
            field="prompts",
        )
    names_and_rows = _table(source)
    if names_and_rows is None:
        return _items(source)
    names, rows = names_and_rows
    index = index_columns(names)
    if fault := column_fault(names, columns, index):
        raise InvalidRequestError(f"prompts: the table {fault}", field="prompts")
    say_ignored("prompts", index)
    return (values_of(row, index) for row in rows)


def _items(source: Any) -> Iterator[Any]:
    if not isinstance(source, Iterable):
        raise InvalidRequestError(
            f"prompts: {type(source).__name__} is neither an iterable of prompts nor a table; collect a lazy "
            "table, and give a file to submit_batch",
            field="prompts",
        )
    if hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__"):
        return (item.as_py() if hasattr(item, "as_py") else item for item in source)  # a column of prompts
    return iter(source)


def _table(source: Any) -> tuple[Sequence[str], Iterator[JsonObject]] | None:
    """Return the columns and rows of a table; None for anything else."""
    if hasattr(source, "to_dicts"):  # Polars
        return list(source.columns), _slices(len(source), lambda at: source.slice(at, _ROWS).to_dicts())
    if hasattr(source, "to_dict") and hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        return _pandas(source)
    is_table = hasattr(source, "schema") or hasattr(source, "columns") or not hasattr(source, "__iter__")
    if is_table and hasattr(source, "__arrow_c_stream__"):
        reader = _pyarrow().RecordBatchReader.from_stream(source)
        return reader.schema.names, chain.from_iterable(batch.to_pylist() for batch in reader)
    if is_table and hasattr(source, "__arrow_c_array__"):
        batch = _pyarrow().record_batch(source)
        return batch.schema.names, iter(batch.to_pylist())
    return None


def _pandas(frame: Any) -> tuple[Sequence[str], Iterator[JsonObject]]:
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()  # an index with a name is a column

    def rows(at: int) -> list[JsonObject]:
        part = frame.iloc[at : at + _ROWS]
        found: list[JsonObject] = part.astype(object).where(part.notna(), None).to_dict("records")
        return found

    return [str(name) for name in frame.columns], _slices(len(frame), rows)


def _slices(length: int, rows: Any) -> Iterator[JsonObject]:
    return chain.from_iterable(rows(at) for at in range(0, length, _ROWS))


def arrow_table(rows: Iterable[JsonObject], columns: Mapping[str, str]) -> Any:
    """Build a pyarrow.Table with these columns and types; raises MissingExtraError without pyarrow."""
    arrow = _pyarrow()
    schema = arrow_schema(arrow, columns)
    rows = iter(rows)
    batches = []
    while some := list(islice(rows, _ROWS)):
        batches.append(arrow.RecordBatch.from_pylist(some, schema=schema))
    return arrow.Table.from_batches(batches, schema=schema)


def pandas_frame(rows: Iterable[JsonObject], columns: Mapping[str, str]) -> Any:
    """Build a pandas.DataFrame with these columns; raises MissingExtraError without pandas."""
    pandas = with_pandas()
    kept = list(rows)
    return pandas.DataFrame(
        {
            name: pandas.Series([row[name] for row in kept], dtype=_DTYPES.get(kind, "object"))
            for name, kind in columns.items()
        }
    )


def with_pandas() -> Any:
    """Return the module; raises MissingExtraError without it."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError(f"to_pandas needs pandas: {pip_install('pandas')}") from error
    return pandas


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtraError(f"Arrow tables need pyarrow: {pip_install('parquet')}") from error
    return pyarrow
