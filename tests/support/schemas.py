"""Random JSON schemas of the kinds that people write, by families of keywords; the same ones for a seed.

Lengths are bounded, so that a model that draws at random comes to an end. `hostile` makes what nobody means
well: schemas, regular expressions and grammars that are wrong, huge, deep or slow.
"""

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]
_WORDS = [
    "name",
    "age",
    "city",
    "tags",
    "price",
    "grade",
    "note",
    "id",
    "état",
    "名",
    'quo"te',
    "back\\slash",
]


def text(draw: random.Random) -> Schema:
    low = draw.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(1, 9)}


def short_text(draw: random.Random) -> Schema:
    return {"type": "string", "maxLength": draw.randrange(9)}


def pattern(draw: random.Random) -> Schema:
    patterns = [
        "^[a-z]{2,6}$",
        r"^\d{3}-\d{4}$",
        "^(yes|no|maybe)$",
        "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$",
        "^x{0,3}y$",
    ]
    return {"type": "string", "pattern": draw.choice(patterns)}


def format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(["date", "ipv4", "uuid", "email"])}


def whole(draw: random.Random) -> Schema:
    low = draw.randrange(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(500)}


def between(draw: random.Random) -> Schema:
    low = draw.randrange(-20, 20)
    return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + draw.randrange(2, 30)}


def number(draw: random.Random) -> Schema:
    low = draw.randrange(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + draw.randrange(1, 90)}


def multiple(draw: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": draw.choice([2, 3, 5, 7, 10]), "minimum": 0, "maximum": 5000}


def boolean(draw: random.Random) -> Schema:
    return {"type": "boolean"}


def null(draw: random.Random) -> Schema:
    return {"type": "null"}


def types(draw: random.Random) -> Schema:
    return {"type": draw.sample(["boolean", "null", "string"], 2), "maxLength": 5}


def enum(draw: random.Random) -> Schema:
    values: list[Any] = ["red", "green", 1, 2.5, None, True, 'a"b', "ü", [1], {"k": "v"}]
    return {"enum": draw.sample(values, draw.randrange(1, 5))}


def const(draw: random.Random) -> Schema:
    return {"const": draw.choice(["fixed", 7, None, [1, 2], {"a": {"b": False}}, "line\nend"])}


def annotated(draw: random.Random) -> Schema:
    return short_text(draw) | {"title": "T", "description": "a note", "default": "", "examples": ["x"]}


LEAVES: dict[str, Callable[[random.Random], Schema]] = {
    "minLength": text, "maxLength": short_text, "pattern": pattern, "format": format, "minimum": whole,
    "exclusiveMinimum": between, "number": number, "multipleOf": multiple, "boolean": boolean, "null": null,
    "types": types, "enum": enum, "const": const, "annotations": annotated,
}  # fmt: skip


def closed_object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: any_schema(draw, depth - 1)[1] for name in names},
        "required": names[: draw.randrange(len(names) + 1)],
        "additionalProperties": False,
    }


def open_object(draw: random.Random, depth: int) -> Schema:
    made = closed_object(draw, depth)
    made["required"] = [*made["properties"]]
    made["additionalProperties"] = LEAVES[draw.choice(["boolean", "minimum", "maxLength"])](draw)
    made["maxProperties"] = len(made["required"]) + draw.randrange(3)
    return made


def counted_object(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(2)
    return {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": low,
        "maxProperties": low + draw.randrange(1, 3),
    }


def patterned_object(draw: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^a[0-9]$": {"type": "boolean"}, "^b[0-9]$": {"type": "null"}},
        "additionalProperties": False,
        "maxProperties": 3,
    }


def array(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(3)
    items = any_schema(draw, depth - 1)[1]
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randrange(3)}


def tuple_(draw: random.Random, depth: int) -> Schema:
    parts = [any_schema(draw, depth - 1)[1] for _ in range(draw.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [any_schema(draw, depth - 1)[1] for _ in range(draw.randrange(1, 4))]}


def one_of(draw: random.Random, depth: int) -> Schema:
    return {"oneOf": [short_text(draw), whole(draw), {"type": "null"}]}


def tagged(draw: random.Random, depth: int) -> Schema:
    def case(tag: str) -> Schema:
        properties = {"kind": {"const": tag}, "value": any_schema(draw, depth - 1)[1]}
        return {
            "type": "object", "properties": properties, "required": ["kind", "value"],
            "additionalProperties": False,
        }  # fmt: skip

    return {"oneOf": [case("a"), case("b")]}


def all_of(draw: random.Random, depth: int) -> Schema:
    first = {"type": "object", "properties": {"a": whole(draw)}, "required": ["a"]}
    second = {"properties": {"b": short_text(draw), "a": {"multipleOf": 1}}, "required": ["b"]}
    return {"allOf": [first, second], "maxProperties": 2, "required": ["a", "b"]}


def references(draw: random.Random, depth: int) -> Schema:
    definition = any_schema(draw, depth - 1)[1]
    pair = {
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}],
        "items": False,
    }
    return {"$defs": {"one": definition}, **pair}


def recursion(draw: random.Random, depth: int) -> Schema:
    leaf = whole(draw)
    nested = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
    return {"$defs": {"tree": {"anyOf": [leaf, nested]}}, "$ref": "#/$defs/tree"}


NESTED: dict[str, Callable[[random.Random, int], Schema]] = {
    "properties": closed_object, "additionalProperties": open_object, "minProperties": counted_object,
    "patternProperties": patterned_object, "items": array, "prefixItems": tuple_, "anyOf": any_of,
    "oneOf": one_of,
    "tagged": tagged, "allOf": all_of,
}  # fmt: skip
AT_THE_TOP: dict[str, Callable[[random.Random, int], Schema]] = {"$ref": references, "recursion": recursion}
FAMILIES = [*LEAVES, *NESTED, *AT_THE_TOP]


def any_schema(draw: random.Random, depth: int) -> tuple[str, Schema]:
    """The name of its family, and a schema."""
    name = draw.choice([*LEAVES, *NESTED] if depth > 0 else [*LEAVES])
    return name, LEAVES[name](draw) if name in LEAVES else NESTED[name](draw, depth)


def schemas(seed: int, count: int) -> list[tuple[str, Schema]]:
    """So many, each family as often as the others at the top."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        name = FAMILIES[index % len(FAMILIES)]
        if name in LEAVES:
            made.append((name, LEAVES[name](draw)))
        else:
            made.append((name, (NESTED | AT_THE_TOP)[name](draw, 2)))
    return made


# -- hostile -------------------------------------------------------------------------------------


def hostile(seed: int, count: int) -> list[Mapping[str, Any]]:
    """Keywords of enqueue: schemas, regular expressions and grammars, by turns."""
    draw = random.Random(seed)
    makers = [_damaged_schema, _regex, _grammar]
    return [makers[index % len(makers)](draw) for index in range(count)]


def _damaged_schema(draw: random.Random) -> Mapping[str, Any]:
    """A schema in which some values are others."""

    def damage(value: Any) -> Any:
        if draw.random() < 0.08:
            return draw.choice(
                [None, -1, 1e9, 10**30, "", "string", [], {}, True, {"$ref": "#"}, {"$ref": "#/$defs/x"},
                 {"type": "integer", "multipleOf": 977}, {"pattern": "(.{0,90}a){1,90}"},
                 {"maxLength": 10**7}]
            )  # fmt: skip
        if isinstance(value, dict):
            return {key: damage(part) for key, part in value.items()}
        return [damage(part) for part in value] if isinstance(value, list) else value

    made = damage(any_schema(draw, 3)[1])
    return {"json_schema": made if isinstance(made, dict) else {"const": made}}


def _regex(draw: random.Random) -> Mapping[str, Any]:
    parts = ["a", ".", "[a-z]", r"\d", r"\w+", "(", ")", "|", "*", "+", "?", "{2}", "{0,50}", "{1,}",
             "^", "$", "(?=", r"\b",
             "[^\\x00-\\x7f]", r"\p{L}", "(?i)", "(?:", "/", "\\", "é", "\n", "&", "~"]  # fmt: skip
    return {"regex": "".join(draw.choice(parts) for _ in range(draw.randrange(1, 30)))}


def _grammar(draw: random.Random) -> Mapping[str, Any]:
    """Rules that name each other at random, in Lark or GBNF, with marks left out and doubled now and then."""
    gbnf = draw.random() < 0.3
    names = ["root" if gbnf else "start", *(f"r{index}" for index in range(draw.randrange(1, 8)))]

    def term() -> str:
        atom = draw.choice(
            [
                f'"{draw.choice(string.ascii_letters)}"',
                draw.choice(names),
                '"x" | "y"',
                "( r0 )",
                "[a-f]" if gbnf else "/[a-f]/",
            ]
        )
        return atom + draw.choice(["", "", "*", "+", "?", "{2,40}"])

    sign = " ::= " if gbnf else ": "
    lines = [name + sign + " ".join(term() for _ in range(draw.randrange(1, 5))) for name in names]
    made = "\n".join(lines)
    if draw.random() < 0.2:
        place = draw.randrange(len(made))
        made = made[:place] + draw.choice(["", "(", "\x01", "%json {", "<[0-99]>", made]) + made[place + 1 :]
    return {"grammar": made}
