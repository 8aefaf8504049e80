"""A sandboxed process that reads an untrusted Parquet file and may be killed at any time.

A few hundred bytes can expand to gigabytes: a compressed page, a long text stored once in a dictionary, a
million empty rows. Here memory and processor time are limited, and a crash of pyarrow affects nobody else.
`jobs.formats.parquet_reader` starts this as a script, with the file as standard input, and reads its standard
output; the package is not imported, which would take a second.

The output is frames (kind, length, JSON): first the columns and the number of rows, then groups of rows, and
at the end success or an error. A row is an object, or a word that says why it cannot be read. Output of this
process is never unpickled.
"""

import gc
import json
import os
import re
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

sys.path += sys.argv[2:]  # the location of pyarrow; skipping the search of site-packages saves time
_FIRST_WITHOUT_NUMPY = 18  # version of pyarrow that can do without it


def _leave_out_numpy(packages: str) -> None:
    """Keep pyarrow from importing NumPy, which takes as long as all else; nothing here needs it.

    `packages` is the folder that pyarrow is in.
    """
    said = Path(packages, "pyarrow", "_generated_version.py")
    found = re.search(r"version = '(\d+)\.", said.read_text()) if said.exists() else None
    if found is not None and int(found[1]) >= _FIRST_WITHOUT_NUMPY:
        sys.modules["numpy"] = None  # type: ignore[assignment]


_leave_out_numpy(sys.argv[2])
import pyarrow as arrow  # noqa: E402
from pyarrow import parquet  # noqa: E402

FRAME = struct.Struct("<cI")
COLUMNS, ROWS, END, FAULT, EXHAUSTED = b"C", b"R", b"Z", b"F", b"X"
TOO_LONG, NOT_UTF8 = "too long", "not UTF-8"
OTHER_TYPE = "\0type"
"""Key of an object that replaces a value without a JSON form; its value is the type's name."""
SIZES = (2048, 64, 1)
"""Rows decoded at once; smaller numbers are tried if memory runs out."""
_SENT_AT_ONCE = 1 << 20  # most bytes of a frame's rows in Arrow's memory, except for a single row
_MOST_ROWS = 256  # rows of a frame
_BUFFER = 1 << 18  # bytes of each column read at once


class LimitError(Exception):
    """The file contains more than its size allows."""


class Sender:
    """A writer of frames, with counts."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._out = open(1, "wb", closefd=False)  # noqa: SIM115 - it is standard output
        self.rows = 0
        self._bytes = 0

    def send(self, kind: bytes, value: Any) -> None:
        """Write one frame."""
        self._write(kind, encoded(value))

    def send_batch(self, batch: Any, skipped: int) -> Iterator[int]:
        """Write the rows of a record batch after `skipped` ones; yields how many were written each time."""
        columns = [plain(column) for column in batch.columns]
        dense = arrow.RecordBatch.from_arrays(columns, schema=plain_schema(batch.schema, columns))
        at_once = max(1, min(_MOST_ROWS, len(dense) * _SENT_AT_ONCE // max(1, dense.nbytes)))
        for at in range(skipped, len(dense), at_once):
            yield self._send_rows(dense.slice(at, at_once))

    def _send_rows(self, part: Any) -> int:
        rows = self._values(part)
        data = encoded(rows)
        frames = [data] if len(data) <= self._limits["row_bytes"] else map(self._row, rows)
        self.rows += len(part)
        self._bytes += len(data)
        if self.rows > self._limits["rows"]:
            raise LimitError(f"has more than {self._limits['rows']:,} rows")
        if self._bytes > self._limits["bytes"]:
            raise LimitError(f"has rows of more than {self._limits['bytes']:,} bytes together")
        for frame in frames:
            self._write(ROWS, frame)
        return len(part)

    def _values(self, part: Any) -> list[Any]:
        """The rows of a record batch."""
        return values(part)

    def _row(self, row: Any) -> bytes:
        """Encode one row."""
        data = encoded([row])
        return data if len(data) <= self._limits["row_bytes"] else encoded([TOO_LONG])

    def _write(self, kind: bytes, data: bytes) -> None:
        self._out.write(FRAME.pack(kind, len(data)))
        self._out.write(data)
        self._out.flush()


def plain(column: Any) -> Any:
    """A column without a dictionary, and in microseconds in place of nanoseconds, which Python has not."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if arrow.types.is_timestamp(kind) and kind.unit == "ns":
        return column.cast(arrow.timestamp("us", kind.tz), safe=False)
    if arrow.types.is_time64(kind) and kind.unit == "ns":
        return column.cast(arrow.time64("us"), safe=False)
    if arrow.types.is_duration(kind) and kind.unit == "ns":
        return column.cast(arrow.duration("us"), safe=False)
    return column


def plain_schema(schema: Any, columns: list[Any]) -> Any:
    """Return the schema with dictionary columns decoded."""
    return arrow.schema(
        [arrow.field(field.name, column.type) for field, column in zip(schema, columns, strict=True)]
    )


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=other, separators=(",", ":")).encode()


def other(value: Any) -> Any:
    """Convert a value without a JSON form."""
    if isinstance(value, Decimal):
        return float(value) if value.as_tuple().exponent < 0 else int(value)  # type: ignore[operator]
    return {OTHER_TYPE: type(value).__name__}


def values(part: Any, read: Callable[[Any], list[Any]] = lambda part: part.to_pylist()) -> list[Any]:
    """Return the rows of a record batch; a text column may contain any bytes."""
    try:
        return read(part)
    except UnicodeDecodeError:
        if len(part) == 1:
            return [NOT_UTF8]
        half = len(part) // 2
        return values(part.slice(0, half), read) + values(part.slice(half), read)


def opened() -> Any:
    return parquet.ParquetFile("/dev/fd/0", buffer_size=_BUFFER, pre_buffer=False)


def read(sender: Sender, limits: dict[str, int]) -> None:
    """Write the content of the file."""
    file = opened()
    names, rows, groups = file.schema_arrow.names, file.metadata.num_rows, file.metadata.num_row_groups
    if rows > limits["rows"]:
        raise LimitError(f"has {rows:,} rows")
    sender.send(COLUMNS, {"columns": names, "rows": rows})
    for group in range(groups):
        done = 0
        for size in SIZES:
            if file is None:
                gc.collect()
                file = opened()
            try:
                for sent in sent_of_group(sender, file, group, size, done):
                    done += sent
                break
            except MemoryError:
                file = None  # it is read again, fewer rows at a time
                if size == SIZES[-1]:
                    raise
    sender.send(END, None)


def sent_of_group(sender: Sender, file: Any, group: int, size: int, done: int) -> Iterator[int]:
    """Write a row group except its first `done` rows; yields how many were written each time."""
    for batch in file.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
        skipped = min(done, len(batch))
        done -= skipped
        if skipped < len(batch):
            yield from sender.send_batch(batch, skipped)


def warm_up() -> None:
    """Make pyarrow load and allocate everything before the limits apply."""
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.table({"prompt": ["Once"]}), sink, compression="zstd")
    parquet.ParquetFile(sink.getvalue()).read().to_pylist()


def confine(limits: dict[str, int]) -> None:
    """Drop what a reader does not need, for good. The memory limit is relative to current use."""
    bounds = {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_FSIZE: (0, 0)}
    if seconds := limits["seconds"]:
        bounds[resource.RLIMIT_CPU] = (seconds, seconds + 1)  # SIGXCPU tells the reason, SIGKILL would not
    if limits["memory"] and (memory := Path("/proc/self/statm")).exists():
        most = int(memory.read_text().split()[0]) * resource.getpagesize() + limits["memory"]
        bounds[resource.RLIMIT_AS] = (most, most)
    for name, bound in bounds.items():
        resource.setrlimit(name, bound)


def main(
    read: Callable[[Sender, dict[str, Any]], None] = read,
    sender_of: Callable[[dict[str, Any]], Sender] = Sender,
) -> None:
    limits: dict[str, Any] = json.loads(sys.argv[1])
    arrow.set_cpu_count(1)
    arrow.set_io_thread_count(1)
    warm_up()
    confine(limits)
    sender = sender_of(limits)
    try:
        read(sender, limits)
    except BrokenPipeError:
        sys.exit(1)  # the reader is gone
    except MemoryError:
        gc.collect()
        sender.send(EXHAUSTED, None)
    except LimitError as error:
        sender.send(EXHAUSTED, str(error))
    except (arrow.ArrowException, OSError, ValueError, RecursionError) as error:
        known = error.errno if isinstance(error, OSError) else None  # messages of disk errors are long
        said = os.strerror(known) if known else str(error).partition("\n")[0][:500]
        sender.send(FAULT, said or type(error).__name__)


if __name__ == "__main__":
    main()
