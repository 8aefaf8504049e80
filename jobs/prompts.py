"""What may be prompted with: a text, token ids, or a chat as any program writes it, to what a row keeps.

Histories saved from an API hold nulls (`"tool_calls": null`), contents in parts, and the role `developer`;
these say nothing that a text model cannot follow, so they are accepted. What carries content that would be
lost (images, tool calls, names) is refused by name.
"""

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from nightmill.jobs.contract import MAX_TOKEN_ID, JsonObject, unstorable
from nightmill.jobs.errors import InvalidPromptError, RowCode

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system"  # OpenAI's later word for the same role
}
_KNOWN_ROLES = "'system', 'user', 'assistant' or 'tool'"


def check_text(text: str) -> str:
    """A plain prompt; raises InvalidPromptError."""
    if not text:
        raise InvalidPromptError("prompt: is empty", field="prompt")
    if problem := unstorable(text):
        raise InvalidPromptError(f"prompt: {problem}", field="prompt")
    return text


def is_id(value: object) -> bool:
    """Whether a value is of a type that token ids are of; those of NumPy are, too."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def check_token_ids(values: Iterable[Any]) -> list[int]:
    """A prompt of token ids; raises InvalidPromptError. Whether the model has them, its worker says."""
    checked = [value.__index__() if is_id(value) else -1 for value in values]
    for place, (value, token_id) in enumerate(zip(values, checked, strict=True)):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            said = f"must be a token id, a whole number from 0 to {MAX_TOKEN_ID} (got {str(value)[:100]!r})"
            raise _bad(f"prompt[{place}]", said)
    return checked


def check_messages(messages: Any) -> list[JsonObject]:
    """A chat as messages of a role and a text each; raises InvalidPromptError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise _bad("messages", f"must be a list of messages, not {json_type(messages)}")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not checked:
        raise _bad("messages", "the list is empty")
    return checked


def _message(message: Any, place: str) -> JsonObject:
    if not isinstance(message, Mapping):
        raise _bad(place, f'must be an object with "role" and "content", not {json_type(message)}')
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            said = "is not supported; a message has role and content"
            raise _bad(f"{place}.{name}", said, RowCode.UNSUPPORTED_FIELD)
    role, content = message.get("role"), message.get("content")
    for name, value in (("role", role), ("content", content)):
        if value is None:
            raise _bad(f"{place}.{name}", "is missing; a message needs it", RowCode.MISSING_FIELD)
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{place}.role", f"must be {_KNOWN_ROLES} (got {str(role)[:100]!r})")
    if isinstance(content, list | tuple):
        content = "".join(_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise _bad(f"{place}.content", f"must be a text, not {json_type(content)}")
    if problem := unstorable(content):
        raise _bad(f"{place}.content", problem)
    return {"role": _ROLES[role], "content": content}


def _part(part: Any, place: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if isinstance(kind, str) and kind != "text":
        said = f"parts of type {kind!r} are not supported; only text is"
        raise _bad(place, said, RowCode.UNSUPPORTED_FIELD)
    if kind != "text" or not isinstance(text, str):
        raise _bad(place, 'must be {"type": "text", "text": "..."}')
    return text


def _bad(place: str, said: str, code: RowCode = RowCode.INVALID_VALUE) -> InvalidPromptError:
    return InvalidPromptError(f"{place}: {said}", field=place, code=code)


_TYPES: tuple[tuple[Any, str], ...] = (
    (type(None), "null"),
    (bool, "true or false"),  # before numbers, of which Python takes it for one
    ((int, float), "a number"),
    (str, "a text"),
    (Mapping, "an object"),
    (list, "a list"),
)


def json_type(value: Any) -> str:
    """What JSON calls a value's type, for messages."""
    return next((name for types, name in _TYPES if isinstance(value, types)), type(value).__name__)
