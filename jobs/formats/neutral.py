"""Unsupported keys of foreign requests that are accepted while their value has no effect."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.request.prompts import json_type

_LONGEST_SHOWN = 60  # characters of a value in a message


def check_neutral(name: str, value: Any, neutral: Iterable[Any], refusal: str | None = None) -> None:
    """Raise InvalidRequestError with `refusal` unless the value is null or has no effect."""
    if value is None or any(_same(value, one) for one in neutral):
        return
    said = f"{name}: {short(value)} {refusal or 'is not supported; remove it'}"
    raise InvalidRequestError(said, field=name, code=RowCode.UNSUPPORTED_FIELD)


def short(value: Any) -> str:
    """Format a value as JSON, or name its type if that is long."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if not any(isinstance(item, Mapping | list) for item in inside):
        shown = json.dumps(value, ensure_ascii=False)
        if len(shown) <= _LONGEST_SHOWN:
            return shown
    return f"this {json_type(value).split(maxsplit=1)[1]}"  # drops the article


def _same(value: Any, neutral: Any) -> bool:
    # True equals 1 in Python, but not in JSON.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
