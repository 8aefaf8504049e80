"""Checks of a job's options: each raises ValueError that says what is wrong with the value."""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from nightmill.jobs.base.contract import unstorable
from nightmill.jobs.request.effort import effort_fault
from nightmill.jobs.request.prompts import json_type

Check = Callable[[Any], None]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/@-]{0,199}")
MAX_VARIABLES = 16
_LONGEST_SHOWN = 100  # characters of a value in a message
RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "conversation", "tokenize", "raise_exception", "strftime_now", "self",
    }
)  # fmt: skip
"""Names that every chat template defines otherwise; names of tokens (bos_token) are reserved, too."""
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_SHORT_TEXT = re.compile(r"[A-Za-z0-9 _.,:;+/()'!?-]{0,256}")
# An escaped NUL in JSON: after an even number of backslashes, as otherwise it is a backslash and five
# letters.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def text(longest: int) -> Check:
    """Accept a text of 1 to `longest` characters that SQL can store."""

    def check(value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise _not(f"a text of 1 to {longest} characters", value)
        _check_storable(value)

    return check


def whole_number(lowest: int, highest: int) -> Check:
    """Accept a whole number within these bounds."""

    def check(value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise _not(f"a whole number from {lowest} to {highest}", value)

    return check


def one_of(*words: str) -> Check:
    """Accept one of these words."""

    def check(value: Any) -> None:
        if value not in words:
            raise _not(" or ".join(map(str, words)), value)

    return check


def model_name(value: Any) -> None:
    """Accept the name of a model."""
    if not isinstance(value, str) or not _MODEL_NAME.fullmatch(value):
        raise _not("a name of letters, digits and . _ : + / @ -", value)


def effort(value: Any) -> None:
    """Accept how much a model is to reason."""
    if fault := effort_fault(value):
        raise ValueError(fault)


def moment(value: Any) -> None:
    """Accept a point in time, or a time from now."""
    if not isinstance(value, datetime | timedelta):
        raise _not("a datetime or a timedelta", value)
    if isinstance(value, datetime) and value.tzinfo is None:
        raise ValueError(f"must have a time zone, e.g. datetime.now(timezone.utc) (got {str(value)!r})")


def flag(value: Any) -> None:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise _not("true or false", value)


def template_variables(value: Any) -> None:
    """Accept variables for a chat template: few, short, and none that the template defines itself.

    Texts may not contain the characters of special tokens, so a variable cannot forge a message.
    """
    if not isinstance(value, Mapping):
        raise _not("a mapping of names to values", value)
    if len(value) > MAX_VARIABLES:
        raise ValueError(f"must have at most {MAX_VARIABLES} names (got {len(value)})")
    for name, entry in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"names must be of letters, digits and _ (got {str(name)[:100]!r})")
        if name in RESERVED or name.endswith("_token"):
            raise ValueError(f"{name} is the template's own and cannot be given; remove it")
        number = isinstance(entry, int | float) and math.isfinite(entry)  # also true and false
        if not number and not (isinstance(entry, str) and _SHORT_TEXT.fullmatch(entry)):
            rule = f"{name} must be true, false, a number, or a text of up to 256 letters, digits, spaces and"
            raise ValueError(f"{rule} _ . , : ; + / ( ) ' ! ? - (got {str(entry)[:100]!r})")


def json_object(value: Any) -> None:
    """Accept a mapping that JSON and SQL can store."""
    if not isinstance(value, Mapping):
        raise _not("a mapping that JSON can hold", value)
    try:
        encoded = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    _check_storable(_ESCAPED_NUL.sub("\\1\0", encoded))


def _check_storable(text: str) -> None:
    if problem := unstorable(text):
        raise ValueError(problem)


def _not(rule: str, value: object) -> ValueError:
    return ValueError(f"must be {rule} (got {shown(value)})")


def shown(value: object) -> str:
    """Format the beginning of a value for a message: a text in quotes, others as `5, a number`."""
    if isinstance(value, str):
        return repr(value[:_LONGEST_SHOWN])
    said = json.dumps(value) if value is None or isinstance(value, bool) else str(value)[:_LONGEST_SHOWN]
    kind = json_type(value)
    return said if kind in ("null", "true or false") else f"{said}, {kind}"
