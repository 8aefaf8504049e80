"""CSV as rows: columns are the keys of plain rows, and an empty cell is an absent key.

A CSV cell is text, so numbers and flags are read by their column, and `messages` and `metadata` hold JSON;
`stop` and `stop_token_ids` hold one text or number, or a JSON list of them. A cell that cannot be read so
stays a text, which the checks of the row then refuse by name.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import BatchFileError, RowCode
from nightmill.jobs.fields import FIELDS, Kind
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_value
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.formats.rows import RowError, printable

DELIMITERS = ",;\t"
KINDS = {name: field.kind for name, field in FIELDS.items()} | {"messages": Kind.OBJECT}
"""What the cells of a column hold; those of others hold text."""
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_EXACT_FLOATS = 2.0**53  # whole numbers up to here survive a column that was stored as floating point


def read_csv(stream: TextIO, label: str) -> Iterator[tuple[int, JsonObject | RowError]]:
    """(1-based record number, its cells by column), from text decoded with `surrogateescape`.

    The first record names the columns; it is not counted, nor are empty lines. Raises BatchFileError, with
    `label` for the file, if the columns are not those of plain rows.
    """
    # The limit is the whole process's, so it is only ever raised; without it, 128 KiB end a cell.
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
    lines = _Lines(stream)
    header = next(iter(lines), "")
    delimiter = max(DELIMITERS, key=lambda mark: len(ROW_KEYS & set(_cells(header, mark))))
    columns = _cells(header, delimiter)
    check_columns(columns, label)
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    number = 0
    while True:
        lines.begin_record()
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            yield number, _broken(error)
            continue
        if cells or lines.cut:
            number += 1
            yield number, _record(columns, cells, cut=lines.cut)


class _LongRecordError(csv.Error):
    """The record goes on for more lines than it may have characters."""


class _Lines:
    """The lines of a text; one that is too long is left out, and `cut` is set.

    Raises _LongRecordError for a record whose lines together are too long: quotes that are never closed would
    else have the rest of the file collected in memory.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._characters = 0  # of the record, so far
        self.cut = False

    def begin_record(self) -> None:
        """The next line is the first one of a record."""
        self._characters = 0
        self.cut = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(LINE_LIMIT + 1)
        if not line:
            raise StopIteration
        self._characters += len(line)
        if len(line) <= LINE_LIMIT or line.endswith("\n"):
            if self._characters > LINE_LIMIT + 1:
                raise _LongRecordError
            return line
        self.cut = True
        quotes = 0
        while line:
            quotes += line.count('"')
            line = "" if line.endswith("\n") else self._stream.readline(LINE_LIMIT + 1)
        return '"\n' if quotes % 2 else "\n"  # the next line is as much within quotes as it was before


def _cells(line: str, delimiter: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]


def _broken(error: csv.Error) -> RowError:
    if isinstance(error, _LongRecordError) or "field limit" in str(error):
        message = f"has more than {LINE_LIMIT} characters; shorten its cells, or close their quotes"
        return RowError(RowCode.TOO_LONG, message)
    return RowError(RowCode.INVALID_CSV, f"is not CSV: {error}; double the quotes within quoted cells")


def _record(columns: Sequence[str], cells: list[str], *, cut: bool) -> JsonObject | RowError:
    if cut:
        return RowError(RowCode.TOO_LONG, f"has more than {LINE_LIMIT} characters; shorten its prompt")
    if any("\udc80" <= c <= "\udcff" for cell in cells if not cell.isascii() for c in cell):
        return RowError(RowCode.INVALID_ENCODING, "holds bytes that are not UTF-8; save the file as UTF-8")
    if len(cells) != len(columns):
        return RowError(
            RowCode.INVALID_CSV,
            f"has {len(cells)} cells for {len(columns)} columns; quote cells that hold the delimiter",
        )
    pairs = zip(columns, cells, strict=True)
    return {column: _from_text(column, cell) for column, cell in pairs if cell != ""}


def _from_text(column: str, cell: str) -> Any:
    kind = KINDS.get(column, Kind.TEXT)
    if kind is Kind.INTEGER:
        return _converted(cell, int, lambda text: whole(float(text)))
    if kind is Kind.NUMBER:
        return _converted(cell, float)
    if kind is Kind.FLAG:
        return _FLAGS.get(cell.strip().lower(), cell)
    if kind in (Kind.OBJECT, Kind.OBJECTS) or (
        kind in (Kind.TEXTS, Kind.INTEGERS) and cell.lstrip().startswith("[")
    ):
        return _converted(cell, parse_value)
    if kind is Kind.INTEGERS:
        return _converted(cell, int)
    return cell


def _converted(cell: str, *conversions: Callable[[str], Any]) -> Any:
    for convert in conversions:
        try:
            return convert(cell)
        except (ValueError, OverflowError):
            continue
    return cell


def whole(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < _EXACT_FLOATS else value


def check_columns(columns: Sequence[str], label: str) -> None:
    """Refuse a table whose columns are not keys of plain rows: every row of it would be bad."""
    if fault := column_fault(columns, ROW_KEYS):
        raise BatchFileError(f"{label}: {fault}")


def column_fault(columns: Sequence[str], keys: frozenset[str]) -> str | None:
    """Why these cannot be the columns of prompts, where `keys` may be; None if they can."""
    known = ", ".join(sorted(keys))
    if not {"prompt", "messages"} & set(columns):
        return f"has no column prompt or messages; known are {known}"
    seen = set[str]()
    for column in columns:
        if column not in keys:
            return (
                f"column {printable(column)!r} is not supported; remove it, or put it into metadata as JSON; "
                f"known are {known}"
            )
        if column in seen:
            return f"column {column!r} is there twice; remove one"
        seen.add(column)
    return None
