"""Plain rows: `prompt` or `messages`, with the keywords of enqueue beside them."""

import difflib
from typing import Any

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.formats.messages import normalise
from nightmill.jobs.formats.rows import RowCode, RowRefusedError
from nightmill.jobs.requests import OPTIONS, PARAMETERS

# What concerns the batch as a whole, and what a row cannot say for itself.
_OF_THE_BATCH = {
    "batch": "the whole file is one batch: name it when you submit it",
    "deadline": "it is given for the whole batch, when you submit it",
    "scheduled_at": "it is given for the whole batch, when you submit it",
    "idempotency_key": "in a batch, custom_id has its part",
}
ROW_SETTINGS = (PARAMETERS | OPTIONS) - _OF_THE_BATCH.keys() - {"custom_id"}
"""The keywords of enqueue that a row may give besides its prompt and custom_id."""
ROW_KEYS = ROW_SETTINGS | {"prompt", "messages", "custom_id"}


def split_plain(values: JsonObject) -> tuple[Any, JsonObject]:
    """A plain row as (prompt, keywords of enqueue); null counts as absent. Raises RowRefusedError."""
    given = {name: value for name, value in values.items() if value is not None}
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if prompt is not None and messages is not None:
        raise RowRefusedError(
            RowCode.INVALID_VALUE, "prompt: give either prompt or messages, not both", "prompt"
        )
    for name in given:
        if name not in ROW_SETTINGS:
            raise unknown_key(name, _OF_THE_BATCH, ROW_KEYS)
    if messages is not None:
        return normalise(messages, "messages"), given
    if prompt is None:
        raise RowRefusedError(
            RowCode.MISSING_FIELD, "prompt: is missing; give a prompt (a text) or messages (a list)", "prompt"
        )
    return normalise(prompt, "prompt") if isinstance(prompt, list) else prompt, given


def unknown_key(
    name: str, reasons: dict[str, str], known: frozenset[str], prefix: str = ""
) -> RowRefusedError:
    """The error for a key that is not supported: why, or which one may have been meant."""
    field = f"{prefix}{name}"
    close = difflib.get_close_matches(str(name), known, n=1)
    if name in reasons:
        hint = reasons[name]
    elif close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = "remove it; known are " + ", ".join(sorted(known))
    return RowRefusedError(RowCode.UNSUPPORTED_FIELD, f"{field}: is not supported: {hint}", field)
