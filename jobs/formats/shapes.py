"""Type checks of values in foreign requests; errors name the place."""

from collections.abc import Collection, Mapping
from typing import Any

from nightmill.jobs.base.contract import JsonObject, unstorable
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.request.prompts import json_type

_LONGEST_NAME = 100  # characters of a foreign name in a message


def unsupported(place: str, said: str) -> InvalidRequestError:
    """Make the error for a key that would change the answer and is not supported."""
    return InvalidRequestError(f"{place}: {said}", field=place, code=RowCode.UNSUPPORTED_FIELD)


def mapping(value: Any, place: str, shape: str) -> Mapping[str, Any]:
    """Check that the value is an object; `shape` describes the expected form."""
    if not isinstance(value, Mapping):
        raise invalid(place, f"must be {shape}, not {json_type(value)}")
    return value


def only(value: Mapping[str, Any], known: Collection[str], place: str, ignored: Collection[str] = ()) -> None:
    """Refuse keys that are neither `known` nor `ignored`; null counts as absent."""
    for name, one in value.items():
        if one is not None and name not in known and name not in ignored:
            said = f"is not supported: remove it; known are {', '.join(sorted(known))}"
            raise unsupported(f"{place}.{name[:_LONGEST_NAME]}", said)


def items_of(value: Any, place: str) -> list[Any]:
    """Check that the value is a list."""
    if not isinstance(value, list | tuple):
        raise invalid(place, f"must be a list, not {json_type(value)}")
    return list(value)


def text_of(value: Any, place: str) -> str:
    """Check that the value is a text that SQL can store."""
    if value is None:
        raise missing(place, "give a text")
    if not isinstance(value, str):
        raise invalid(place, f"must be a text, not {json_type(value)}")
    if problem := unstorable(value):
        raise invalid(place, problem)
    return value


def flag_of(value: Any, place: str, default: bool) -> bool:
    """Check that the value is true or false; null means `default`."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(place, f"must be true or false, not {json_type(value)}")
    return value


def type_of(value: Mapping[str, Any], place: str, known: Mapping[str, Any], remedy: str) -> str:
    """Return the `type` of an object, which must be one of `known`."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in known:
        shown = repr(kind[:_LONGEST_NAME]) if isinstance(kind, str) else json_type(kind)
        said = f"{shown} is not supported: {remedy}; known are {', '.join(known)}"
        raise unsupported(f"{place}.type", said)
    return kind


def joined(content: Any, place: str, kinds: Mapping[str, str], remedy: str) -> str:
    """Return a text, or the joined texts of its parts.

    kinds   allowed types of parts, with the key of the text of each
    remedy  remedy for any other part
    """
    if not isinstance(content, list | tuple):
        return text_of(content, place)
    texts = []
    for index, part in enumerate(content):
        where = f"{place}[{index}]"
        part = mapping(part, where, "a part, an object with a type")
        kind = type_of(part, where, kinds, remedy)
        texts.append(text_of(part.get(kinds[kind]), f"{where}.{kinds[kind]}"))
    return "".join(texts)


def called(call_id: Any, name: Any, arguments: Any) -> JsonObject:
    """Build a function call of a chat message; `check_messages` checks it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
