"""What the options of a job may be: each check raises ValueError with what is wrong with a value."""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from nightmill.jobs.contract import unstorable

Check = Callable[[Any], None]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/@-]{0,199}")
MAX_VARIABLES = 16
RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "conversation", "tokenize", "raise_exception", "strftime_now", "self",
    }
)  # fmt: skip
"""Names that a chat template has from elsewhere; so are those of tokens (bos_token)."""
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_SHORT_TEXT = re.compile(r"[A-Za-z0-9 _.,:;+/()'!?-]{0,256}")
# In JSON; behind an even number of backslashes, or else it is a backslash and five letters.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def text(longest: int) -> Check:
    """A text that SQL can hold, of 1 to `longest` characters."""

    def check(value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise _not(f"a text of 1 to {longest} characters", value)
        _check_storable(value)

    return check


def whole_number(lowest: int, highest: int) -> Check:
    """A whole number in these bounds."""

    def check(value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise _not(f"a whole number from {lowest} to {highest}", value)

    return check


def model_name(value: Any) -> None:
    """The name of a model."""
    if not isinstance(value, str) or not _MODEL_NAME.fullmatch(value):
        raise _not("a name of letters, digits and . _ : + / @ -", value)


def moment(value: Any) -> None:
    """A point in time, or a time from now."""
    if not isinstance(value, datetime | timedelta):
        raise _not("a datetime or a timedelta", value)
    if isinstance(value, datetime) and value.tzinfo is None:
        raise ValueError(f"must have a time zone, e.g. datetime.now(timezone.utc) (got {str(value)!r})")


def flag(value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _not("true or false", value)


def template_variables(value: Any) -> None:
    """What a chat template may look at besides the messages: few and short, and none of its own.

    Texts have no characters of which special tokens are made: what a caller writes there is no message.
    """
    if not isinstance(value, Mapping):
        raise _not("a mapping of names to values", value)
    if len(value) > MAX_VARIABLES:
        raise ValueError(f"must have at most {MAX_VARIABLES} names (got {len(value)})")
    for name, one in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"names must be of letters, digits and _ (got {str(name)[:100]!r})")
        if name in RESERVED or name.endswith("_token"):
            raise ValueError(f"{name} is the template's own and cannot be given; remove it")
        number = isinstance(one, int | float) and math.isfinite(one)  # also true and false
        if not number and not (isinstance(one, str) and _SHORT_TEXT.fullmatch(one)):
            rule = f"{name} must be true, false, a number, or a text of up to 256 letters, digits, spaces and"
            raise ValueError(f"{rule} _ . , : ; + / ( ) ' ! ? - (got {str(one)[:100]!r})")


def json_object(value: Any) -> None:
    """A mapping that JSON and SQL can hold."""
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
    return ValueError(f"must be {rule} (got {str(value)[:100]!r})")
