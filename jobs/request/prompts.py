"""Parsing of prompts: a text, token ids, or a chat as other programs write it, into the form stored in a row.

Histories saved from an API contain nulls (`"tool_calls": null`), contents in parts, and the role `developer`;
a text model can handle these, so they are accepted. Content that would be lost (images, audio) is refused by
name.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

from nightmill.jobs.base.contract import MAX_TOKEN_ID, JsonObject, unstorable
from nightmill.jobs.errors import InvalidPromptError, RowCode
from nightmill.jobs.request.schemas import MAX_DEPTH, deeper_than

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system"  # OpenAI's newer name of the role
}
MAX_CALLS = 128  # of one message
_NAME = re.compile(
    r"[A-Za-z0-9_.:/-]{1,256}"
)  # names of functions and calls: without characters of special tokens
_KNOWN_ROLES = "'system', 'developer', 'user', 'assistant' or 'tool'"
_SPEAKER = re.compile(r"[\w.:/-]{1,256}")  # like _NAME, in any script


def check_text(text: str) -> str:
    """Check a plain prompt; raises InvalidPromptError."""
    if not text:
        raise InvalidPromptError("prompt: is empty", field="prompt")
    if problem := unstorable(text):
        raise InvalidPromptError(f"prompt: {problem}", field="prompt")
    return text


def is_id(value: object) -> bool:
    """Return True if the value has a type that token ids may have, including NumPy's integers."""
    # The protocol check comes last: it takes a hundred times as long as comparing types.
    return type(value) is int or (
        not isinstance(value, str | bool | float | list | dict) and isinstance(value, SupportsIndex)
    )


def check_token_ids(values: Iterable[Any]) -> list[int]:
    """Check a prompt of token ids; raises InvalidPromptError. The worker checks that the model has them."""
    checked = []
    for place, value in enumerate(values):
        token_id = value.__index__() if is_id(value) else -1
        if not 0 <= token_id <= MAX_TOKEN_ID:
            said = f"must be a token id, a whole number from 0 to {MAX_TOKEN_ID} (got {str(value)[:100]!r})"
            raise _bad(f"prompt[{place}]", said)
        checked.append(token_id)
    return checked


def check_messages(messages: Any) -> list[JsonObject]:
    """Normalise a chat to messages with a role and a text each; raises InvalidPromptError."""
    if not isinstance(messages, list) and (
        isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable)
    ):
        raise _bad("messages", f"must be a list of messages, not {json_type(messages)}")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not checked:
        raise _bad("messages", "the list is empty")
    return checked


def _message(message: Any, place: str) -> JsonObject:
    if not isinstance(message, dict | Mapping):
        raise _bad(place, f'must be an object with "role" and "content", not {json_type(message)}')
    role = message.get("role")
    if role is None:
        raise _bad(f"{place}.role", "is missing; a message needs it", RowCode.MISSING_FIELD)
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{place}.role", f"must be {_KNOWN_ROLES} (got {str(role)[:100]!r})")
    more = _MORE[role]
    said: JsonObject = {}
    for name, value in message.items():
        if name in ("role", "content") or value is None or (name == "annotations" and value == []):
            continue
        if name not in more:
            known = ", ".join(("role", "content", *more))
            raise _bad(
                f"{place}.{name}",
                f"is not supported; a message of this role has {known}",
                RowCode.UNSUPPORTED_FIELD,
            )
        said[name] = more[name](value, f"{place}.{name}")
    content = message.get("content")
    if content is None and said.get("tool_calls"):
        content = ""
    if content is None:
        raise _bad(f"{place}.content", "is missing; a message needs it", RowCode.MISSING_FIELD)
    if isinstance(content, list | tuple):
        content = "".join(_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    return {"role": _ROLES[role], "content": _text(content, f"{place}.content")} | {
        name: value for name, value in said.items() if value != []
    }


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _bad(place, f"must be a text, not {json_type(value)}")
    if problem := unstorable(value):
        raise _bad(place, problem)
    return value


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        rule = "must have 1 to 256 letters, digits and _ . : / -"
        raise _bad(place, f"{rule} (got {str(value)[:100]!r})")
    return value


def _speaker(value: Any, place: str) -> str:
    """Check the name of a message's author, which the template may print."""
    if not isinstance(value, str) or not _SPEAKER.fullmatch(value):
        rule = "must have 1 to 256 letters, digits and _ . : / -"
        raise _bad(place, f"{rule} (got {str(value)[:100]!r})")
    return value


def _calls(value: Any, place: str) -> list[JsonObject]:
    if not isinstance(value, list | tuple):
        raise _bad(place, f"must be a list of calls, not {json_type(value)}")
    if len(value) > MAX_CALLS:
        raise _bad(place, f"has {len(value):,} calls, more than {MAX_CALLS}; give fewer")
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(value)]


def _call(call: Any, place: str) -> JsonObject:
    """Normalise a tool call for templates, with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _bad(place, 'must be {"id": ..., "type": "function", "function": {"name", "arguments"}}')
    if call.get("type", "function") != "function":
        said = f"must be 'function' (got {str(call['type'])[:100]!r})"
        raise _bad(f"{place}.type", said, RowCode.UNSUPPORTED_FIELD)
    for inside, known, where in (
        (call, ("id", "type", "function", "index"), place),
        (function, ("name", "arguments"), f"{place}.function"),
    ):
        for name, value in inside.items():
            if name not in known and value is not None:
                raise _bad(
                    f"{where}.{str(name)[:100]}", "is not supported; remove it", RowCode.UNSUPPORTED_FIELD
                )
    made: JsonObject = {
        "type": "function",
        "function": {
            "name": _name(function.get("name"), f"{place}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
        },
    }
    given = call.get("id")
    return made if given is None else {"id": _name(given, f"{place}.id")} | made


def _arguments(value: Any, place: str) -> str:
    """Return the arguments of a call as JSON text; APIs send such a text, some programs the object itself."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        read = json.loads(text or "{}")
        if deeper_than(read, MAX_DEPTH):
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(place, f"must be the text of a JSON object: {error}") from None
    if not isinstance(read, dict):
        raise _bad(place, f"must be the text of a JSON object, not of {json_type(read)}")
    return _text(text or "{}", place)


_MORE: dict[str, dict[str, Callable[[Any, str], Any]]] = {
    "system": {"name": _speaker},
    "developer": {"name": _speaker},
    "user": {"name": _speaker},
    "assistant": {"tool_calls": _calls, "reasoning_content": _text, "name": _speaker},
    "tool": {"tool_call_id": _name, "name": _name},
}
"""Readers of the further keys of messages, by role."""


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
    (bool, "true or false"),  # before the numbers: in Python, bool is a subclass of int
    ((int, float), "a number"),
    (str, "a text"),
    (Mapping, "an object"),
    (list, "a list"),
)


def json_type(value: Any) -> str:
    """Name the JSON type of a value, for messages."""
    return next((name for types, name in _TYPES if isinstance(value, types)), type(value).__name__)
