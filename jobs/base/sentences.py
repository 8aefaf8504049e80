"""Error messages of pydantic as Nightmill's sentences, with the value."""

from typing import Any

_LONGEST_VALUE = 100
_SENTENCES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_unicode": "must be valid Unicode",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "missing": "is missing",
    "extra_forbidden": "is not known",
}
"""Sentences by type of error, for every type that our models can raise; a test looks for others."""
_WITHOUT_VALUE = frozenset({"missing", "extra_forbidden", "string_unicode"})


def sentence(error: Any, *, value: bool = True) -> str:
    """Turn one entry of `ValidationError.errors()` into a sentence, with the value unless `value` is False.

    Messages of our own validators are returned unchanged.
    """
    kind = error["type"]
    if kind in ("value_error", "assertion_error"):
        said = str(error["ctx"]["error"])
    else:
        limits = {name: _plain(limit) for name, limit in error.get("ctx", {}).items()}
        said = _SENTENCES[kind].format(**limits) if kind in _SENTENCES else error["msg"]
    if not value or "input" not in error or kind in _WITHOUT_VALUE:
        return said
    shown = repr(error["input"])
    return f"{said} (got {shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 1] + '…'})"


def _plain(limit: object) -> object:
    """Write a whole limit as 1 instead of 1.0: pydantic gives limits as floats."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
