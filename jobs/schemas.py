"""What can be said of a JSON schema without a parser: its depth, and keywords that nothing can enforce.

An answer is held to its schema while it is generated, token by token. Keywords that need the whole value to
judge it (are its items unique? does it *not* match?) cannot be enforced so, and are refused by name in place
of being passed over. Only what the root reaches counts: definitions that nothing refers to are not looked at.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64
"""Of objects and lists in each other; a parser of schemas recurses, and its stack has an end."""

REFUSED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
        "dependentSchemas", "dependentRequired", "dependencies", "uniqueItems", "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    }
)  # fmt: skip
"""Keywords that no worker can enforce."""
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ValueError that names what cannot be enforced, and where it stands."""
    if deeper_than(schema, MAX_DEPTH):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep; flatten it, or use $defs and $ref")
    seen = set[int]()
    left: list[tuple[_Place, Any]] = [(("#", None), schema)]
    while left:
        place, part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        for name in part:
            if name in REFUSED:
                raise ValueError(
                    f"the keyword {name!r} at {_shown(place)} cannot be enforced while an answer is "
                    "generated: remove it, and check the answers for it"
                )
        left += _within(place, part)
        if isinstance(pointer := part.get("$ref"), str):
            left.append(((pointer, None), _at(schema, pointer)))


_Place = tuple[object, "_Place | None"]
"""A step of the way to a schema, and the place where the way comes from.

It becomes a text only for a message: the places of n small schemas below one long key, each written out,
would have the key's length n times.
"""
_LONGEST_PLACE = 200  # characters that a message shows


def _shown(place: _Place) -> str:
    steps: list[str] = []
    at: _Place | None = place
    while at is not None:
        step, at = at
        steps.append(str(step)[: _LONGEST_PLACE + 1])
    said = "/".join(reversed(steps))
    return said if len(said) <= _LONGEST_PLACE else f"{said[:_LONGEST_PLACE]}..."


def _within(place: _Place, part: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """The schemas that a schema holds, with their places."""
    for name in _SCHEMAS:
        yield (name, place), part.get(name)
    for name in _LISTS:
        if isinstance(found := part.get(name), list | tuple):
            yield from (((index, (name, place)), one) for index, one in enumerate(found))
    for name in _MAPS:
        if isinstance(found := part.get(name), Mapping):
            yield from (((key, (name, place)), one) for key, one in found.items())


def _at(schema: Any, pointer: str) -> Any:
    """What a reference within the schema names; None if it names nothing here."""
    if not pointer.startswith("#"):
        return None
    for step in pointer.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list | tuple):
            schema = schema[int(key)] if key.isdecimal() and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def deeper_than(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested deeper than so many levels."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            part
            for one in layer
            if isinstance(one, Mapping | list | tuple)
            for part in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not layer:
            return False
    return True
