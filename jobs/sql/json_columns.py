"""JSON of columns, by the parser that Pydantic brings: several times as fast as Python's own.

Where that one refuses a value which Python's takes (half of a surrogate pair, very deep nesting), Python's
decides, so that nothing is stored or read in another way than before.
"""

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

__all__ = ["dump_json", "load_json", "load_json_or_text"]


def load_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError."""
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def load_json_or_text(text: str | bytes) -> Any:
    """Parse a column; invalid JSON is returned as text, for the reader of that one row to refuse."""
    try:
        return load_json(text)
    except ValueError:
        return text


def dump_json(value: Any) -> str:
    """Write what is JSON already, or a time: texts, numbers, lists and objects."""
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError):
        return json.dumps(value, default=str)
