"""Reads a Parquet or Arrow file as a table, in a process of its own: as `parquet_process`, with types.

Its first frame has the file's schema, its rows have JSON's values of `arrow_values`, from which the types
come back. `columns` among its limits names those that are wanted.
"""

import base64
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _beside(name: str) -> Any:
    """A module beside this one, which no path leads to."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


process = _beside("parquet_process")  # first: it finds pyarrow
arrow_values = _beside("arrow_values")

import pyarrow as arrow  # noqa: E402
from pyarrow import ipc  # noqa: E402

_AT_ONCE = 2048  # rows that become JSON's values together
_FILE = "/dev/fd/0"


class TableSender(process.Sender):  # type: ignore[misc,name-defined]
    """Sends rows with values that lead back to their types."""

    def send_batch(self, batch: Any, skipped: int) -> Iterator[int]:
        """Send the rows of a record batch after `skipped` ones; yields how many were sent each time."""
        for at in range(skipped, len(batch), _AT_ONCE):
            yield from super().send_batch(arrow_values.friendly(batch.slice(at, _AT_ONCE)), 0)

    def _values(self, part: Any) -> list[Any]:
        rows: list[Any] = process.values(part, arrow_values.rows_of)
        return rows


def read(sender: Any, limits: dict[str, Any]) -> None:
    """Send what the file holds."""
    with Path(_FILE).open("rb") as file:
        start = file.read(6)
    if start.startswith(b"PAR1"):
        _read_parquet(sender, limits)
    else:
        _read_arrow(sender, limits, stream=start != b"ARROW1")


def _read_parquet(sender: Any, limits: dict[str, Any]) -> None:
    file = process.opened()
    _send_header(sender, file.schema_arrow, file.metadata.num_rows)
    wanted = limits["columns"]
    if wanted is None:
        sender.send(process.END, None)
        return
    dotted = any("." in name for name in file.schema_arrow.names)  # which pyarrow takes for a path
    for group in range(file.metadata.num_row_groups):
        for batch in file.iter_batches(
            batch_size=_AT_ONCE, row_groups=[group], use_threads=False, columns=None if dotted else wanted
        ):
            _send(sender, batch, wanted)
    sender.send(process.END, None)


def _read_arrow(sender: Any, limits: dict[str, Any], *, stream: bool) -> None:
    with arrow.memory_map(_FILE) as source:
        reader = ipc.open_stream(source) if stream else ipc.open_file(source)
        _send_header(sender, reader.schema, -1)
        wanted = limits["columns"]
        if wanted is not None and stream:
            for batch in reader:
                _send(sender, batch, wanted)
        elif wanted is not None:
            for number in range(reader.num_record_batches):
                _send(sender, reader.get_batch(number), wanted)
    sender.send(process.END, None)


def _send_header(sender: Any, schema: Any, rows: int) -> None:
    said = {"columns": schema.names, "rows": rows}
    sender.send(process.COLUMNS, said | {"schema": base64.b64encode(schema.serialize()).decode()})


def _send(sender: Any, batch: Any, wanted: list[str]) -> None:
    for _ in sender.send_batch(batch.select(wanted), 0):
        pass


if __name__ == "__main__":
    process.main(read, TableSender)
