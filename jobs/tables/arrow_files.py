"""Parquet and Arrow files of answers, and such tables in memory: kept columns in the types that they had."""

import base64
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError, MissingExtraError
from nightmill.jobs.formats.rows import FLOATS, FileFormat
from nightmill.jobs.tables.kinds import BOOLEAN, JSON, NUMBER, TEXT, WHOLE

if TYPE_CHECKING:
    from nightmill.jobs.tables.layout import TableLayout

_ROW_GROUP = 4096  # written at once
_GROUP_BYTES = 64 << 20  # of texts, roughly, after which fewer rows are


class ArrowFileWriter:
    """Rows of a layout into a Parquet file, or an Arrow file, which can be read once it is closed."""

    def __init__(self, path: Path, layout: "TableLayout", label: str) -> None:
        self._arrow = pyarrow()
        self._layout = layout
        self._label = label
        self._schema = schema_of(layout)
        self._rows: list[JsonObject] = []
        self._size = 0
        with _errors(label):
            if layout.format is FileFormat.PARQUET:
                from pyarrow import parquet

                self._writer: Any = parquet.ParquetWriter(path, self._schema)
                self._sink: Any = None
            else:
                self._sink = self._arrow.OSFile(str(path), "wb")
                self._writer = self._arrow.ipc.new_file(self._sink, self._schema)

    def write(self, rows: Sequence[JsonObject]) -> None:
        """Add rows."""
        self._rows += rows
        self._size += sum(len(value) for row in rows for value in row.values() if isinstance(value, str))
        if len(self._rows) >= _ROW_GROUP or self._size >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Write the rest."""
        self._write_group()
        with _errors(self._label):
            self._writer.close()
            if self._sink is not None:
                self._sink.close()

    def discard(self) -> None:
        """Let go of the file, which nobody will read."""
        with suppress(self._arrow.ArrowException, OSError):  # the disk may be full: that was said already
            self._writer.close()
            if self._sink is not None:
                self._sink.close()
        self._writer.is_open = False  # pyarrow would try once more, and complain on stderr

    def _write_group(self) -> None:
        with _errors(self._label):
            if self._rows:
                self._writer.write_batch(batch_of(self._rows, self._layout, self._schema))
        self._rows, self._size = [], 0


def table_of(rows: Iterable[JsonObject], layout: "TableLayout") -> Any:
    """Rows of a layout as a pyarrow.Table; raises MissingExtraError without pyarrow."""
    arrow, schema = pyarrow(), schema_of(layout)
    rows = iter(rows)
    batches = []
    while some := list(islice(rows, _ROW_GROUP)):
        batches.append(batch_of(some, layout, schema))
    return arrow.Table.from_batches(batches, schema=schema)


def read_ids(path: Path, layout: "TableLayout") -> Iterator[str] | None:
    """The job ids of a file; None if it is not one of exactly these columns."""
    arrow = pyarrow()
    from pyarrow import parquet

    try:
        if layout.format is FileFormat.PARQUET:
            with parquet.ParquetFile(path) as file:
                found = file.schema_arrow
        else:
            with arrow.memory_map(str(path)) as source:
                found = arrow.ipc.open_file(source).schema
    except arrow.ArrowException:
        return None
    if (
        found.names not in [list(columns) for columns in layout.known_columns()]
        or found.field(layout.id_column).type != arrow.string()
    ):
        return None
    return _ids(path, layout)


def _ids(path: Path, layout: "TableLayout") -> Iterator[str]:
    arrow = pyarrow()
    from pyarrow import parquet

    name = layout.id_column
    if layout.format is FileFormat.PARQUET:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROW_GROUP, columns=[name]):
                yield from batch.column(0).to_pylist()
        return
    with arrow.memory_map(str(path)) as source:
        reader = arrow.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield from reader.get_batch(number).column(name).to_pylist()


def schema_of(layout: "TableLayout") -> Any:
    """The Arrow schema of a layout."""
    arrow = pyarrow()
    kinds = {
        TEXT: arrow.string(),
        WHOLE: arrow.int64(),
        NUMBER: arrow.float64(),
        BOOLEAN: arrow.bool_(),
        JSON: arrow.string(),
        FLOATS: arrow.list_(arrow.float32()),
    }
    if layout.shape.schema is None:
        kept = [arrow.field(name, kinds[kind]) for name, kind in layout.shape.kept]
    else:
        fields = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(layout.shape.schema)))
        # A row that could not be read has no values, also in columns that had one in each row.
        kept = [field.with_nullable(True) for field in fields]
    return arrow.schema(kept + [arrow.field(one.name, kinds[one.kind]) for one in layout.ours])


def batch_of(rows: list[JsonObject], layout: "TableLayout", schema: Any) -> Any:
    """Rows of a layout as a record batch of its schema."""
    from nightmill.jobs.formats.arrow_values import restored

    arrow = pyarrow()
    typed = {name for name, _ in layout.shape.kept} if layout.shape.schema is not None else set()
    columns = [
        restored([row.get(field.name) for row in rows], field.type)
        if field.name in typed
        else arrow.array(layout.flat(rows, field.name), type=field.type)
        for field in schema
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def pyarrow() -> Any:
    """The module; raises MissingExtraError without it."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtraError(
            f"Arrow tables and Parquet files need pyarrow: {pip_install('parquet')}"
        ) from error
    return pyarrow


@contextmanager
def _errors(label: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow().ArrowException, OSError) as error:
        known = error.errno if isinstance(error, OSError) else None  # a full disk is said with many words
        said = os.strerror(known) if known else str(error).partition("\n")[0]
        kind = BatchFileUnavailableError if known else BatchFileError
        raise kind(f"{label}: cannot be written: {said}") from error
