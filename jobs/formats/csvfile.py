"""CSV files as rows: columns are the keys of plain rows, and an empty cell is an absent key.

A CSV cell is text, so numbers and flags are parsed by column, and `messages` and `metadata` contain JSON;
`stop` and `stop_token_ids` contain one text or number, or a JSON list. A cell that cannot be parsed stays
text, which the checks of the row then refuse by name.
"""

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, BinaryIO, TextIO

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError, IgnoredColumnWarning, RowCode
from nightmill.jobs.formats.dialect import BYTE_ORDER_MARK, DELIMITERS, Dialect
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_value
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.formats.rows import RowError, printable
from nightmill.jobs.request.fields import FIELDS, FieldKind

AS_UTF8 = "save the file as UTF-8, or convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
"""The remedy for files in another encoding, mostly that of Excel's plain CSV."""
UTF_16_AS_UTF8 = "save it as UTF-8, or convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
AS_TEMPLATE = "--template, or template= of jobs.submit_batch"
"""The option that takes tables of any columns."""
KINDS = {name: field.kind for name, field in FIELDS.items()} | {"messages": FieldKind.OBJECT}
"""Types of cells by column; others contain text."""
_INDEX = re.compile(r"__index_level_\d+__")  # pandas' names in typed tables
_UNNAMED = re.compile(r"|Unnamed: \d+")
_SEP = re.compile(r"sep=([^\"])", re.IGNORECASE)  # Excel's own first line, which names the delimiter
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_EXACT_FLOATS = 2.0**53  # largest whole number that survives a floating-point column


def read_csv(stream: TextIO, label: str) -> Iterator[tuple[int, JsonObject | RowError]]:
    """Yield (1-based record number, cells by column) from text decoded with `surrogateescape`.

    The first record names the columns; it and empty lines are not counted. Raises BatchFileError, with
    `label` for the file, if the columns are not those of plain rows.
    """
    lines = _Lines(stream)
    header, delimiter = _first_line(lines, DELIMITERS, _known_names)
    columns = _named(_cells(header, delimiter), label)
    index = check_columns(columns, label, index_columns(columns, text=True))
    for number, cells in _records(lines, delimiter, len(columns)):
        if isinstance(cells, RowError):
            yield number, cells
        else:
            pairs = zip(columns, cells, strict=True)
            record = {column: _from_text(column, cell) for column, cell in pairs if cell != ""}
            yield number, without(record, index)


def read_cells(
    stream: TextIO, label: str, delimiter: str | None = None
) -> tuple[list[str], Iterator[tuple[int, list[str] | RowError]]]:
    """The columns of any CSV, and (1-based record number, its cells); the text is decoded as for `read_csv`.

    delimiter  by default whichever the header has most of

    Raises BatchFileError, with `label` for the file, for names that are not UTF-8.
    """
    lines = _Lines(stream)
    start, chosen = _first_line(lines, DELIMITERS if delimiter is None else delimiter, len)
    try:
        # A quoted name may go on in the next line.
        header = next(csv.reader(chain([start], lines), delimiter=chosen, strict=True), [])
    except csv.Error:
        header = _cells(start, chosen)
    names = _named([name.strip() for name in header], label)
    return names, _records(lines, chosen, len(names))


def dialect_of(stream: BinaryIO, delimiter: str | None = None, *, of_prompts: bool) -> Dialect:
    """Return the dialect of a CSV from its beginning.

    delimiter   that of a table, if it is known
    of_prompts  its columns are keys of plain rows, not those of any table
    """
    mark = stream.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK
    stream.seek(0)
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    delimiters = DELIMITERS if delimiter is None else delimiter
    _, chosen = _first_line(_Lines(text), delimiters, _known_names if of_prompts else len)
    text.detach()
    return Dialect(chosen if chosen in DELIMITERS else ",", mark)


def _first_line(lines: "_Lines", delimiters: str, fits: Callable[[list[str]], int]) -> tuple[str, str]:
    """The line of the columns' names, and the delimiter that fits it best. Lines before it may be empty, and
    one may name the delimiter, as Excel's do."""
    names = ""
    for line in lines:
        if found := _SEP.fullmatch(line.strip(" \r\n")):
            delimiters = found[1]
        elif line.strip(" \r\n"):
            names = line
            break
    return names, max(delimiters, key=lambda mark: fits(_cells(names, mark)))


def _known_names(cells: list[str]) -> int:
    """Count the cells that are keys of plain rows."""
    return len(ROW_KEYS & set(cells))


def _named(names: list[str], label: str) -> list[str]:
    """Names of columns without the empty ones at their end, which have no values either.

    Raises BatchFileError for names that are not UTF-8.
    """
    if any(map(_has_other_bytes, names)):
        raise BatchFileError(f"{label}: the names of its columns hold bytes that are not UTF-8; {AS_UTF8}")
    return _without_tail(names, 0)


def _without_tail(cells: list[str], width: int) -> list[str]:
    """Cells without the empty ones at their end that are beyond a width."""
    last = len(cells)
    while last > width and not cells[last - 1].strip():
        last -= 1
    return cells[:last]


def _records(lines: "_Lines", delimiter: str, width: int) -> Iterator[tuple[int, list[str] | RowError]]:
    """(1-based number, the cells) of each record; empty lines do not count."""
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
            cells = _without_tail(cells, width)
            yield number, _fault(cells, width, cut=lines.cut) or cells


class _LongRecordError(csv.Error):
    """A record continues over more lines than its limit of characters allows."""


class _Lines:
    """The lines of a text; a line that is too long is skipped, and `cut` is set.

    Raises _LongRecordError for a record whose lines together are too long: an unclosed quote would otherwise
    collect the rest of the file in memory.
    """

    def __init__(self, stream: TextIO) -> None:
        # The limit is the whole process's, so it is only ever raised; without it, 128 KiB end a cell.
        csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
        self._stream = stream
        self._characters = 0  # length of the record so far
        self.cut = False

    def begin_record(self) -> None:
        """Start a new record with the next line."""
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
        return '"\n' if quotes % 2 else "\n"  # the next line stays inside or outside quotes as before


def _cells(line: str, delimiter: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]


def _broken(error: csv.Error) -> RowError:
    if isinstance(error, _LongRecordError) or "field limit" in str(error):
        message = f"has more than {LINE_LIMIT} characters; shorten its cells, or close their quotes"
        return RowError(RowCode.TOO_LONG, message)
    if "unexpected end of data" in str(error):
        message = "a cell's quote is not closed, so that all lines behind it are part of it; close it"
        return RowError(RowCode.INVALID_CSV, message)
    return RowError(RowCode.INVALID_CSV, f"is not CSV: {error}; double the quotes within quoted cells")


def _fault(cells: list[str], width: int, *, cut: bool) -> RowError | None:
    if cut:
        return RowError(RowCode.TOO_LONG, f"has more than {LINE_LIMIT} characters; shorten its prompt")
    if any(map(_has_other_bytes, cells)):
        return RowError(RowCode.INVALID_ENCODING, f"holds bytes that are not UTF-8; {AS_UTF8}")
    if len(cells) != width:
        found = f"has {len(cells)} cell{'s' * (len(cells) != 1)} for {width} column{'s' * (width != 1)}"
        remedy = (
            "quote cells that hold the delimiter"
            if len(cells) > width
            else "quote cells that hold line ends, and write the delimiters of empty ones"
        )
        return RowError(RowCode.INVALID_CSV, f"{found}; {remedy}")
    return None


def _has_other_bytes(cell: str) -> bool:
    """True if a text that was decoded with `surrogateescape` holds bytes that are not UTF-8."""
    return not cell.isascii() and any("\udc80" <= c <= "\udcff" for c in cell)


def _from_text(column: str, cell: str) -> Any:
    kind = KINDS.get(column, FieldKind.TEXT)
    if kind is FieldKind.INTEGER:
        return _converted(cell, int, lambda text: whole(float(text)))
    if kind is FieldKind.NUMBER:
        return _converted(cell, float)
    if kind is FieldKind.FLAG:
        return _FLAGS.get(cell.strip().lower(), cell)
    if kind in (FieldKind.OBJECT, FieldKind.OBJECTS) or (
        kind in (FieldKind.TEXTS, FieldKind.INTEGERS) and cell.lstrip().startswith("[")
    ):
        return _converted(cell, parse_value)
    if kind is FieldKind.INTEGERS:
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


def index_columns(columns: Sequence[str], *, text: bool = False) -> frozenset[str]:
    """Return the columns that are the index of a pandas frame.

    text  of CSV, where the first columns are the index if they have no name, also as pandas reads and writes
          that again
    """
    found = {column for column in columns if _INDEX.fullmatch(column)}
    if text:
        found.update(takewhile(_UNNAMED.fullmatch, columns))
    return frozenset(found)


def check_columns(columns: Sequence[str], label: str, index: frozenset[str]) -> frozenset[str]:
    """Refuse a table whose columns are not keys of plain rows, as every row would be bad.

    Columns of the `index` are ignored with a warning; returns them.
    """
    if fault := column_fault(columns, ROW_KEYS, index):
        raise BatchFileError(f"{label}: {fault}")
    say_ignored(label, index)
    return index


def say_ignored(label: str, index: frozenset[str]) -> None:
    """Warn that columns are ignored, if there are any."""
    if index:
        named = ", ".join(sorted(repr(printable(column)) for column in index))
        what = f"column {named} is" if len(index) == 1 else f"columns {named} are"
        warnings.warn(
            f"{label}: {what} ignored: the index of a pandas frame, which index=False leaves out",
            IgnoredColumnWarning,
            stacklevel=3,
        )


def without(record: Mapping[str, Any], index: frozenset[str]) -> JsonObject:
    """Return a record without the columns of an index."""
    return {name: value for name, value in record.items() if name not in index}


def column_fault(
    columns: Sequence[str], keys: frozenset[str], index: frozenset[str] = frozenset()
) -> str | None:
    """Return why these cannot be columns of prompts, given the allowed `keys` and an `index`; None if they
    can."""
    known = ", ".join(sorted(keys))
    if not {"prompt", "messages"} & set(columns):
        named = next((f"{{{{ {name} }}}}" for name in columns if name), "{{ column }}")
        return (
            "has no column prompt or messages; a template makes prompts of any columns "
            f"({AS_TEMPLATE}, such as 'Classify: {printable(named)}'); known are {known}"
        )
    seen = set[str]()
    for column in columns:
        if column in index:
            continue
        if column not in keys:
            return (
                f"column {printable(column)!r} is not supported; remove it, or put it into metadata as JSON; "
                f"known are {known}"
            )
        if column in seen:
            return f"column {column!r} is there twice; remove one"
        seen.add(column)
    return None
