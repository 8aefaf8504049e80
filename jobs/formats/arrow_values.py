"""Values of Arrow columns as values of JSON, and back to their types without a loss.

Numbers, truth, texts, lists and structs are what JSON has. Dates, times and decimals are texts as Arrow
writes them, durations whole numbers of their unit, bytes base64, maps lists of pairs. The process that reads
strangers' files loads this module by its path, so it imports nothing of the package.
"""

import base64
import math
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as arrow
from pyarrow import types

Convert = Callable[[Any], Any]
_MOMENT = re.compile(r"(?:(-?\d{4,})-(\d\d)-(\d\d)(?: |$))?(?:(\d\d):(\d\d):(\d\d)(?:\.(\d+))?Z?)?")
_BEYOND = re.compile(r"<value out of range: (-?\d+)>")  # as Arrow writes what is beyond its calendar
_EPOCH = date(1970, 1, 1).toordinal()
_DAYS_OF_400_YEARS = 146_097
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


def friendly(batch: Any) -> Any:
    """A record batch whose columns `to_json` takes."""
    columns = [_friendly_column(column) for column in batch.columns]
    fields = [
        arrow.field(field.name, column.type) for field, column in zip(batch.schema, columns, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=arrow.schema(fields))


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a `friendly` record batch with JSON's values. Raises UnicodeDecodeError."""
    converts = {field.name: made for field in batch.schema if (made := _to_json(field.type)) is not None}
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows if converts else ():
        for name, convert in converts.items():
            if (value := row[name]) is not None:
                row[name] = convert(value)
    return rows


def restored(values: list[Any], kind: Any) -> Any:
    """An array of a type from the values of JSON that `rows_of` gave. None stays None."""
    convert = _from_json(kind)
    if convert is not None:
        values = [None if value is None else convert(value) for value in values]
    made = arrow.array(values, type=_mapped(kind, _counted_leaf))
    wanted = _plain(kind)
    if made.type != wanted:
        made = made.cast(wanted)
    if types.is_dictionary(kind):
        return made.dictionary_encode().cast(kind)
    return made if made.type == kind else made.cast(kind)


def friendly_type(kind: Any) -> Any:
    """Map a type to the one that JSON's values are made from."""
    return _mapped(_plain(kind), _friendly_leaf)


def _plain(kind: Any) -> Any:
    """A type without dictionaries, run ends, extensions and zones, all of which cast back."""
    return _mapped(kind, lambda leaf: leaf)


def _friendly_leaf(kind: Any) -> Any:
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        return arrow.string()
    if types.is_decimal(kind):
        return arrow.string()
    if types.is_duration(kind):
        return arrow.int64()
    if types.is_float16(kind) or types.is_float32(kind):
        return arrow.float64()
    return kind


def _counted_leaf(kind: Any) -> Any:
    """The type that a leaf is restored from: whole numbers for moments, which cast to them in any nesting."""
    if types.is_date32(kind) or types.is_time32(kind):
        return arrow.int32()
    if types.is_temporal(kind) and not types.is_interval(kind):
        return arrow.int64()
    return kind if types.is_decimal(kind) else _friendly_leaf(kind)


def _mapped(kind: Any, leaf: Callable[[Any], Any]) -> Any:
    """A type with another for each of its leaves."""
    if isinstance(kind, arrow.BaseExtensionType):
        return _mapped(kind.storage_type, leaf)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _mapped(kind.value_type, leaf)
    if types.is_map(kind):
        return arrow.map_(_mapped(kind.key_type, leaf), _mapped(kind.item_type, leaf))
    if types.is_fixed_size_list(kind):
        return arrow.list_(_mapped(kind.value_type, leaf), kind.list_size)
    if types.is_large_list(kind):
        return arrow.large_list(_mapped(kind.value_type, leaf))
    if types.is_list(kind):
        return arrow.list_(_mapped(kind.value_type, leaf))
    if types.is_struct(kind):
        return arrow.struct([arrow.field(field.name, _mapped(field.type, leaf)) for field in kind])
    if types.is_timestamp(kind) and kind.tz is not None:
        kind = arrow.timestamp(kind.unit, "UTC")
    return leaf(kind)


def _friendly_column(column: Any) -> Any:
    if isinstance(column, arrow.ExtensionArray):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain, wanted = _plain(column.type), friendly_type(column.type)
    if column.type != plain:
        column = column.cast(plain)
    if types.is_float32(plain):  # the shortest number that is the same, in place of all its bits: 4.9
        column = column.cast(arrow.string())
    return column if column.type == wanted else column.cast(wanted)


def _to_json(kind: Any) -> Convert | None:
    """Make the function from values of a friendly type to values of JSON; None if they are such already."""
    if types.is_floating(kind):
        return lambda value: value if math.isfinite(value) else _named(value)
    if _is_bytes(kind):
        return lambda value: base64.b64encode(value).decode()
    return _nested(kind, _to_json, lambda pair: list(pair))


def _from_json(kind: Any) -> Convert | None:
    """The way back of `_to_json`."""
    plain = _plain(kind)
    if types.is_floating(plain):
        return float
    if _is_bytes(plain):
        return base64.b64decode
    if types.is_decimal(plain):
        return Decimal
    if types.is_temporal(plain) and not types.is_duration(plain) and not types.is_interval(plain):
        unit = "day" if types.is_date32(plain) else "ms" if types.is_date64(plain) else plain.unit
        return partial(_count, unit=unit)
    return _nested(plain, _from_json, lambda pair: tuple(pair))


def _nested(kind: Any, leaf: Callable[[Any], Convert | None], pair: Convert) -> Convert | None:
    if types.is_map(kind):
        key, item = _or_none(leaf(kind.key_type)), _or_none(leaf(kind.item_type))
        return lambda value: [pair((key(name), item(one))) for name, one in value]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        made = leaf(kind.value_type)
        if made is None:
            return None
        one = _or_none(made)
        return lambda value: [one(part) for part in value]
    if types.is_struct(kind):
        parts = {field.name: _or_none(made) for field in kind if (made := leaf(field.type)) is not None}
        if not parts:
            return None
        return lambda value: {
            name: parts[name](part) if name in parts else part for name, part in value.items()
        }
    return None


def _count(text: str, unit: str) -> int:
    """A moment, as Arrow writes it, in its unit: since 1970, or since midnight for a time of day."""
    if found := _BEYOND.fullmatch(text):
        return int(found[1])
    found = _MOMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a moment")
    year, month, day, hours, minutes, seconds, fraction = found.groups()
    days = 0 if year is None else _day(int(year), int(month), int(day)) - _EPOCH
    if unit == "day":
        return days
    whole = ((days * 24 + int(hours or 0)) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    digits = _DIGITS[unit]
    part = int(f"{fraction or '0':0<{digits}}"[:digits] or 0)
    return int(whole * 10**digits + part)


def _day(year: int, month: int, day: int) -> int:
    """A date's number; Python has no years before 1, but the calendar repeats every 400 years."""
    cycles = (year - 1) // 400
    return date(year - 400 * cycles, month, day).toordinal() + _DAYS_OF_400_YEARS * cycles


def _or_none(convert: Convert | None) -> Convert:
    """A conversion that leaves None alone."""
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _is_bytes(kind: Any) -> bool:
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _named(value: float) -> str:
    """A number that JSON has not."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
