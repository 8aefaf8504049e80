"""The kinds of values in tables that do not say their types, such as JSON lines, and their types in Arrow."""

import json
import math
from collections.abc import Mapping
from typing import Any

TEXT, WHOLE, NUMBER, BOOLEAN, JSON = "string", "int64", "double", "bool", "json"
"""Names of Arrow's types, but for the last: any value, as a JSON text where a type must hold it."""
ARROW = "arrow"
"""The type is in the schema that is kept beside the columns."""
_LARGEST = 2**63


def kind_of(value: Any) -> str | None:
    """The kind of a value of JSON; None of null."""
    if value is None:
        return None
    if isinstance(value, str):
        return TEXT
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int):
        return WHOLE if -_LARGEST <= value < _LARGEST else JSON
    return NUMBER if isinstance(value, float) else JSON


def joined(first: str | None, second: str | None) -> str | None:
    """The kind that holds values of both."""
    if first is None or second is None or first == second:
        return first or second
    return NUMBER if {first, second} == {WHOLE, NUMBER} else JSON


def fits(value: Any, kind: str) -> Any:
    """A value for a column of a kind; None if it does not fit."""
    if value is None or kind == JSON:
        return value
    found = kind_of(value)
    if kind == NUMBER and found == WHOLE:
        return float(value)
    return value if found == kind else None


def flat(value: Any, kind: str) -> Any:
    """Convert a value for a column of one of the kinds above, not of a type of Arrow's own."""
    if value is None:
        return None
    if kind == JSON:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == NUMBER:
        return float(value)  # also of the names of what is not finite
    return value


def cell(value: Any) -> str:
    """A value as a cell of CSV: a text as it is, others as JSON, nothing for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def kept_value(value: Any) -> Any:
    """A value as JSON in SQL takes it: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: kept_value(one) for name, one in value.items()}
    if isinstance(value, list):
        return [kept_value(one) for one in value]
    return value
