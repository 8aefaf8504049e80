"""What can be said of a JSON schema without a parser: its depth, and keywords that nothing can enforce.

An answer is held to its schema while it is generated, token by token. Keywords that need the whole value to
judge it (are its items unique? does it *not* match?) cannot be enforced so, and are refused by name in place
of being passed over. Only what the root reaches counts: definitions that nothing refers to are not looked at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
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
_DEFINITIONS = ("$defs", "definitions")

WHOLE_NUMBERS = 2**63
"""Whole numbers are generated below this and above its negative: the parser has 64 bits for them."""

_LONGEST_PLACE = 200  # characters that a message shows
MOST_DIGITS, MOST_DECIMALS = 15, 22
"""Numbers with more digits, or more places behind the point, are read with an error in the last place."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ValueError that names what cannot be enforced, and where it stands."""
    if deeper_than(schema, MAX_DEPTH):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep; flatten it, or use $defs and $ref")
    for place, part in reachable(schema):
        for name in part:
            if name in REFUSED:
                raise ValueError(
                    f"the keyword {name!r} at {place} cannot be enforced while an answer is generated: "
                    "remove it, and check the answers for it"
                )
        _check_constants(place, part)
        _check_bounds(place, part)
        _check_counts(place, part)
        _check_names(place, part)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a schema stands: the last step of the way to it, and the place that the step is made from.

    It becomes a text only for a message: the places of n small schemas below one long key, each written out,
    would have the key's length n times.
    """

    step: object
    within: "Place | None" = None

    def __str__(self) -> str:
        steps: list[str] = []
        at: Place | None = self
        while at is not None:
            steps.append(str(at.step)[: _LONGEST_PLACE + 1])
            at = at.within
        said = "/".join(reversed(steps))
        return said if len(said) <= _LONGEST_PLACE else f"{said[:_LONGEST_PLACE]}..."


def reachable(schema: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Each schema that the root holds or refers to, once, with its place; the root comes first."""
    seen = set[int]()
    left: list[tuple[Place, Any]] = [(Place("#"), schema)]
    while left:
        place, part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part
        left += _within(place, part, _MAPS)
        if isinstance(pointer := part.get("$ref"), str):
            if pointer == "#" or pointer.startswith("#/"):
                left.append((Place(pointer), _at(schema, pointer)))
            else:  # an anchor or an identifier: of some definition
                left += _within(Place("#"), schema, _DEFINITIONS)


def _check_constants(place: Place, part: Mapping[str, Any]) -> None:
    """The parser of schemas holds numbers as doubles, not always the nearest, and leaves out characters."""
    for keyword in ("const", "enum"):
        left = [part.get(keyword)]
        while left:
            value = left.pop()
            if isinstance(value, Mapping):
                left += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                left += value
            elif isinstance(value, str) and (found := unprintable(value)):
                raise ValueError(
                    f"{keyword} at {place} holds the control character U+{ord(found):04X}, which cannot be "
                    "generated: leave it out"
                )
            elif isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
                raise ValueError(
                    f"{keyword} at {place} holds the number {_shortened(value)}, which cannot be generated "
                    f"exactly, as few beyond 2^53 or of more than {MOST_DIGITS} digits can: make it a text "
                    '("type": "string"), or allow any number and check the answers'
                )


def _check_bounds(place: Place, part: Mapping[str, Any]) -> None:
    for keyword, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        value = part.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool) and sign * value >= WHOLE_NUMBERS:
            raise ValueError(
                f"{keyword} at {place} is {_shortened(value)}, but numbers beyond 2^63 cannot be held to a "
                "bound: leave it out, and check the answers"
            )


def _check_counts(place: Place, part: Mapping[str, Any]) -> None:
    """Keys that no property names may repeat each other, so that only one of them is sure to count."""
    least, required = part.get("minProperties"), part.get("required")
    if not isinstance(least, int | float):
        return
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list | tuple) else ()
    if least > len(named) + 1:
        raise ValueError(
            f"minProperties at {place} is {least}, but {len(named)} properties are required there, and keys "
            "that no property names may repeat each other, so that it cannot be enforced: name and require "
            "more properties, or check the answers"
        )


def _check_names(place: Place, part: Mapping[str, Any]) -> None:
    """A control character has several spellings, in another one of which a key would pass for another key."""
    properties, required = part.get("properties"), part.get("required")
    names = [*properties] if isinstance(properties, Mapping) else []
    names += required if isinstance(required, list | tuple) else []
    for name in names:
        if isinstance(name, str) and any(is_control(character) for character in name):
            raise ValueError(
                f"the property {name[:40]!r} at {place} has a control character in it; rename it"
            )


def is_control(character: str) -> bool:
    """Whether JSON writes it as an escape, or few programs would show it."""
    return character < " " or character == "\x7f"


def unprintable(text: str) -> str:
    """The first control character of a text that has no short escape in JSON; empty if there is none."""
    return next((one for one in text if is_control(one) and one not in "\b\f\n\r\t"), "")


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return -WHOLE_NUMBERS < value < WHOLE_NUMBERS and int(float(value)) == value
    parts = Decimal(repr(value)).normalize().as_tuple()
    exponent = parts.exponent
    return isinstance(exponent, int) and len(parts.digits) <= MOST_DIGITS and abs(exponent) <= MOST_DECIMALS


def _shortened(value: float) -> str:
    try:
        text = str(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "of thousands of digits"
    return text if len(text) <= 40 else f"{text[:20]}... of {len(text)} digits"


def _within(place: Place, part: Mapping[str, Any], maps: tuple[str, ...]) -> Iterator[tuple[Place, Any]]:
    """The schemas that a schema holds, with their places; of those by name, the ones under `maps`."""
    for name in _SCHEMAS:
        yield Place(name, place), part.get(name)
    for name in _LISTS:
        if isinstance(found := part.get(name), list | tuple):
            yield from ((Place(index, Place(name, place)), one) for index, one in enumerate(found))
    for name in maps:
        if isinstance(found := part.get(name), Mapping):
            yield from ((Place(key, Place(name, place)), one) for key, one in found.items())


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
