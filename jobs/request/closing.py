"""Closes the objects of a schema that leave further keys open by saying nothing about them.

JSON Schema lets any object have keys that it does not name, and weak models add some until they are cut off.
Whoever lists properties hardly ever wants that: OpenAI's strict mode refuses such a schema, llama.cpp and
xgrammar (vLLM's default) close it. A closed schema allows a part of what it allowed before, so each answer is
one of the schema as it was given. `"additionalProperties": true` keeps an object open.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nightmill.jobs.request.schemas import at_pointer

_OF_OBJECTS = frozenset(
    {
        "properties", "patternProperties", "additionalProperties", "required", "minProperties",
        "maxProperties",
    }
)  # fmt: skip
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_BY_NAME = ("properties", "patternProperties")
_INSIDE = ("items", "additionalItems", "additionalProperties")
_IN_LISTS = ("items", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which objects that name their properties have no others, unless they say so.

    Left open are objects whose schema is combined with another one (`allOf`, or `anyOf`, `oneOf` and `$ref`
    beside keywords for objects), since closing one would forbid the other's properties; all below `oneOf`,
    whose cases must exclude each other as they were given; and objects that must have keys without a name.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    alone: dict[int, dict[str, Any]] = {}
    combined: dict[int, dict[str, Any]] = {}
    left: list[tuple[Any, bool]] = [(copy, False)]
    while left:
        part, is_combined = left.pop()
        seen = combined if is_combined else alone
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen[id(part)] = part
        left += _within(copy, part, is_combined)
    for key, part in alone.items():
        if key not in combined and _names_all(part):
            part["additionalProperties"] = False
    return copy


def _names_all(part: dict[str, Any]) -> bool:
    """True if a schema names all properties that its objects need, and says nothing about others."""
    names = part.get("properties")
    if not isinstance(names, dict) or any(
        word in part for word in ("additionalProperties", "patternProperties", *_COMBINING)
    ):
        return False
    required, least = part.get("required", []), part.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int | float):
        return False
    return least <= len(names) and all(isinstance(name, str) and name in names for name in required)


def _within(root: dict[str, Any], part: dict[str, Any], is_combined: bool) -> Iterator[tuple[Any, bool]]:
    """The schemas in a schema, and whether each holds together with another one."""
    for word in _BY_NAME:
        if isinstance(found := part.get(word), dict):
            yield from ((one, is_combined) for one in found.values())
    for word in _INSIDE:
        yield part.get(word), is_combined
    for word in _IN_LISTS:
        if isinstance(found := part.get(word), list):
            yield from ((one, is_combined) for one in found)
    says_more = any(word in part for word in _OF_OBJECTS)
    ways = sum(word in part for word in _COMBINING)
    beside = is_combined or says_more or ways > 1
    for word in ("allOf", "anyOf", "oneOf"):
        if isinstance(found := part.get(word), list):
            several = word == "oneOf" or (word == "allOf" and len(found) > 1)
            yield from ((one, beside or several) for one in found)
    if isinstance(pointer := part.get("$ref"), str):
        if pointer == "#" or pointer.startswith("#/"):
            yield at_pointer(root, pointer), beside
        else:  # an anchor or an identifier: of some definition
            for word in _DEFINITIONS:
                if isinstance(found := part.get(word) or root.get(word), dict):
                    yield from ((one, True) for one in found.values())
