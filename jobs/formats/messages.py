"""Chat messages as other programs write them, to the messages that enqueue takes.

Histories saved from an API hold nulls (`"tool_calls": null`), contents in parts, and the role `developer`;
these say nothing that a text model cannot follow, so they are accepted. What carries content that would be
lost (images, tool calls, names) is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.formats.rows import RowCode, RowRefusedError

_ROLES = {"developer": "system"}  # OpenAI's later word for the same role


def normalise(messages: Any, where: str) -> list[JsonObject]:
    """The messages with text contents; `where` names them in errors. Raises RowRefusedError."""
    if not isinstance(messages, list | tuple):
        raise RowRefusedError(
            RowCode.INVALID_VALUE,
            f"{where}: must be a list of messages, not {json_type(messages)}",
            where,
        )
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> JsonObject:
    if not isinstance(message, Mapping):
        raise RowRefusedError(
            RowCode.INVALID_VALUE,
            f'{where}: must be an object with "role" and "content", not {json_type(message)}',
            where,
        )
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in ("role", "content"):
            field = f"{where}.{name}"
            raise RowRefusedError(
                RowCode.UNSUPPORTED_FIELD,
                f"{field}: is not supported; a message has role and content",
                field,
            )
    for name in ("role", "content"):
        if name not in given:
            field = f"{where}.{name}"
            raise RowRefusedError(RowCode.MISSING_FIELD, f"{field}: is missing; a message needs it", field)
    role, content = given["role"], given["content"]
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}


def _part(part: Any, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if isinstance(kind, str) and kind != "text":
        raise RowRefusedError(
            RowCode.UNSUPPORTED_FIELD,
            f"{where}: parts of type {kind!r} are not supported; only text is",
            where,
        )
    if kind != "text" or not isinstance(text, str):
        raise RowRefusedError(
            RowCode.INVALID_VALUE, f'{where}: must be {{"type": "text", "text": "..."}}', where
        )
    return text


def json_type(value: Any) -> str:
    """What JSON calls a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for types, name in (
        ((int, float), "a number"),
        (str, "a text"),
        (Mapping, "an object"),
        (list, "a list"),
    ):
        if isinstance(value, types):
            return name
    return type(value).__name__
