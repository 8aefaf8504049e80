"""Checks of a JSON schema that need no schema parser: its depth, and keywords that cannot be enforced.

A schema is enforced token by token while the answer is generated. Keywords that need the whole value (are its
items unique? does it *not* match?) cannot be enforced this way, and are refused by name instead of being
ignored. Only schemas that the root reaches are checked: unreferenced definitions are not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64
"""Deepest nesting of objects and lists; schema parsers recurse, and their stack is limited."""

REFUSED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
        "dependentSchemas", "dependentRequired", "dependencies", "uniqueItems", "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    }
)  # fmt: skip
"""Keywords that no worker can enforce, but where they say nothing: see `says_nothing` and `closes`."""
_IN_PLACE = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "contains",
     "$ref", "$dynamicRef", "$recursiveRef"}
)  # fmt: skip
"""Keywords whose schemas judge the same value, and so decide which of its parts count as evaluated."""
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")

WHOLE_NUMBERS = 2**63
"""Bound of generated whole numbers and of their negatives: the parser has 64 bits for them."""

_LONGEST_PLACE = 200  # characters that a message shows
MOST_DIGITS, MOST_DECIMALS = 15, 22
"""Most digits and decimals of a number that is parsed without an error in the last place."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError that names a keyword which cannot be enforced, and its place."""
    if deeper_than(schema, MAX_DEPTH):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep; flatten it, or use $defs and $ref")
    for place, part in reachable(schema):
        for name in part:
            if name in REFUSED and not says_nothing(part, name) and not closes(part, name):
                raise ValueError(
                    f"the keyword {name!r} at {place} cannot be enforced while an answer is generated: "
                    "remove it, and check the answers for it"
                )
        pointer = part.get("$ref")
        if "$id" in part and isinstance(pointer, str) and not pointer.startswith("#"):
            raise ValueError(
                f"$id beside $ref at {place} means one thing in draft 7 and another in later ones; remove it"
            )
        _check_constants(place, part)
        _check_bounds(place, part)
        _check_counts(place, part)
        _check_names(place, part)


def says_nothing(part: Mapping[str, Any], name: str) -> bool:
    """Tell whether a keyword of REFUSED is without effect as it stands, so that it can be left out."""
    value = part[name]
    match name:
        case "if":
            return "then" not in part and "else" not in part
        case "then" | "else":
            return "if" not in part
        case "minContains" | "maxContains":
            return "contains" not in part
        case "uniqueItems" | "not":
            return value is False
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "propertyNames":
            return _allows_all(value)
        case "unevaluatedProperties":
            return _allows_all(value) or "additionalProperties" in part
        case "unevaluatedItems":
            rest = part.get("items")
            return _allows_all(value) or (rest is not None and not isinstance(rest, list | tuple))
    return False


def closes(part: Mapping[str, Any], name: str) -> bool:
    """Tell whether a keyword of REFUSED forbids just the rest, as additionalProperties: false does."""
    unevaluated = name in ("unevaluatedProperties", "unevaluatedItems")
    return unevaluated and part[name] is False and _IN_PLACE.isdisjoint(part)


def _allows_all(value: object) -> bool:
    return value is True or value == {}


@dataclass(frozen=True, slots=True)
class SchemaPath:
    """The place of a schema: the last step of its path, and the place that the step starts from.

    The path is written out only for a message: the paths of n small schemas below one long key would repeat
    the key n times.
    """

    step: object
    within: "SchemaPath | None" = None

    def __str__(self) -> str:
        steps: list[str] = []
        at: SchemaPath | None = self
        while at is not None:
            steps.append(str(at.step)[: _LONGEST_PLACE + 1])
            at = at.within
        said = "/".join(reversed(steps))
        return said if len(said) <= _LONGEST_PLACE else f"{said[:_LONGEST_PLACE]}..."


def reachable(schema: Mapping[str, Any]) -> Iterator[tuple[SchemaPath, Mapping[str, Any]]]:
    """Yield each schema that the root contains or refers to, once, with its place; the root comes first."""
    seen = set[int]()
    left: list[tuple[SchemaPath, Any]] = [(SchemaPath("#"), schema)]
    while left:
        place, part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part
        left += _within(place, part, _MAPS)
        if isinstance(pointer := part.get("$ref"), str):
            if pointer == "#" or pointer.startswith("#/"):
                left.append((SchemaPath(pointer), at_pointer(schema, pointer)))
            else:  # an anchor or an identifier, which names some definition
                left += _within(SchemaPath("#"), schema, _DEFINITIONS)


def _check_constants(place: SchemaPath, part: Mapping[str, Any]) -> None:
    """Refuse constants that the parser would change: it stores numbers as doubles, not always the nearest,
    and drops some characters."""
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


def _check_bounds(place: SchemaPath, part: Mapping[str, Any]) -> None:
    for keyword, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        value = part.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool) and sign * value >= WHOLE_NUMBERS:
            raise ValueError(
                f"{keyword} at {place} is {_shortened(value)}, but numbers beyond 2^63 cannot be held to a "
                "bound: leave it out, and check the answers"
            )


def _check_counts(place: SchemaPath, part: Mapping[str, Any]) -> None:
    """Refuse a minimum of properties that needs unnamed keys, as generated keys may repeat each other."""
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


def _check_names(place: SchemaPath, part: Mapping[str, Any]) -> None:
    """Refuse control characters in names: they have several spellings in JSON, so a key could pass for
    another."""
    properties, required = part.get("properties"), part.get("required")
    names = [*properties] if isinstance(properties, Mapping) else []
    names += required if isinstance(required, list | tuple) else []
    for name in names:
        if isinstance(name, str) and any(is_control(character) for character in name):
            raise ValueError(
                f"the property {name[:40]!r} at {place} has a control character in it; rename it"
            )


def is_control(character: str) -> bool:
    """Return True if JSON must escape the character, or if few programs would display it."""
    return character < " " or character == "\x7f"


def unprintable(text: str) -> str:
    """Return the first control character without a short JSON escape; empty if there is none."""
    return next(
        (character for character in text if is_control(character) and character not in "\b\f\n\r\t"), ""
    )


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return -WHOLE_NUMBERS < value < WHOLE_NUMBERS and int(float(value)) == value
    parts = Decimal(repr(value)).normalize().as_tuple()
    exponent = parts.exponent
    return isinstance(exponent, int) and len(parts.digits) <= MOST_DIGITS and abs(exponent) <= MOST_DECIMALS


def _shortened(value: float) -> str:
    try:
        text = str(value)
    except ValueError:  # Python does not format whole numbers of more than 4,300 digits
        return "of thousands of digits"
    return text if len(text) <= 40 else f"{text[:20]}... of {len(text)} digits"


def _within(
    place: SchemaPath, part: Mapping[str, Any], maps: tuple[str, ...]
) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the direct subschemas with their places; named ones only under the keywords in `maps`."""
    for name in _SCHEMAS:
        yield SchemaPath(name, place), part.get(name)
    for name in _LISTS:
        if isinstance(found := part.get(name), list | tuple):
            yield from (
                (SchemaPath(index, SchemaPath(name, place)), subschema)
                for index, subschema in enumerate(found)
            )
    for name in maps:
        if isinstance(found := part.get(name), Mapping):
            yield from (
                (SchemaPath(key, SchemaPath(name, place)), subschema) for key, subschema in found.items()
            )


def at_pointer(schema: Any, pointer: str) -> Any:
    """Resolve a reference within the schema; None if it leads nowhere."""
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
    """Return True if objects and lists are nested deeper than `levels`."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            part
            for container in layer
            if isinstance(container, Mapping | list | tuple)
            for part in (container.values() if isinstance(container, Mapping) else container)
        ]
        if not layer:
            return False
    return True
