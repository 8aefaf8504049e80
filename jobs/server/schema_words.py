"""Building blocks for JSON schemas of requests and responses."""

from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.request.fields import FIELDS, FieldKind
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.server.tiers import NAMES

TEXT: JsonObject = {"type": "string"}
NUMBER: JsonObject = {"type": "integer"}
FLAG: JsonObject = {"type": "boolean"}
TIME: JsonObject = {"type": ["string", "null"], "format": "date-time"}
MAYBE_FLAG: JsonObject = {"type": ["boolean", "null"]}
MAYBE_TEXT: JsonObject = {"type": ["string", "null"]}
MAYBE_NUMBER: JsonObject = {"type": ["integer", "null"]}
TIER: JsonObject = {"enum": [*map(str, NAMES), None]}
TOKENS: JsonObject = {"type": "array", "items": NUMBER, "minItems": 1}
_KINDS: dict[FieldKind, JsonObject] = {
    FieldKind.INTEGER: {"type": ["integer", "null"]},
    FieldKind.NUMBER: {"type": ["number", "null"]},
    FieldKind.FLAG: {"type": ["boolean", "null"]},
    FieldKind.TEXT: {"type": ["string", "null"]},
    FieldKind.TEXTS: {"type": ["string", "array", "null"], "items": TEXT},
    FieldKind.INTEGERS: {"type": ["integer", "array", "null"], "items": NUMBER},
    FieldKind.MOMENT: {"type": ["string", "null"], "examples": ["8h", "2026-11-22T06:00+01:00"]},
    FieldKind.OBJECT: {"type": ["object", "null"]},
    FieldKind.OBJECTS: {"type": ["array", "null"], "items": {"type": "object"}},
}
"""Schemas of fields in bodies, where null counts as absent."""


def object_of(properties: JsonObject, *, optional: tuple[str, ...] = (), **more: Any) -> JsonObject:
    """Build the schema of an object with exactly these properties, all required except the optional ones."""
    required = [name for name in properties if name not in optional]
    made = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return made | more


def named(name: str) -> JsonObject:
    """Refer to a schema in SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


_BOUNDS = GenerationParams.model_json_schema()["properties"]
_BOUND_KEYS = ("minimum", "maximum", "exclusiveMinimum", "default")


def field_of(name: str) -> JsonObject:
    """Build the schema of a job's field."""
    field = FIELDS[name]
    if name == "tool_choice":  # a word or OpenAI's object
        return {"type": ["string", "object", "null"], "description": field.says}
    said = _BOUNDS.get(name, {})
    said = said.get("anyOf", [{}])[0] | said
    bounds = {key: value for key, value in said.items() if key in _BOUND_KEYS and value is not None}
    return ({} if name in CONSTRAINT_FIELDS else _KINDS[field.kind]) | bounds | {"description": field.says}


def list_of(item: JsonObject, **more: JsonObject) -> JsonObject:
    return object_of({"object": {"const": "list"}, "data": {"type": "array", "items": item}} | more)


def several(most: int) -> JsonObject:
    """Build the schema of a prompt, or of a list of up to so many."""
    some: JsonObject = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": [TEXT, TOKENS]}}
    return {"anyOf": [{"type": "string"}, TOKENS, some]}
