"""The top properties of a JSON schema as columns, and an answer's values for them."""

import json
from collections.abc import Mapping
from typing import Any

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.tables.kinds import BOOLEAN, JSON, NUMBER, TEXT, WHOLE, fits

_KINDS = {"string": TEXT, "integer": WHOLE, "number": NUMBER, "boolean": BOOLEAN}
_MOST_REFERENCES = 16  # from one definition to the next


def spread_columns(constrained: Constrained | None) -> tuple[tuple[str, str], ...]:
    """(name, kind) of the top properties of the schema that answers obey; raises InvalidParameterError."""
    if constrained is None or constrained.kind is not ConstraintKind.JSON_SCHEMA:
        raise _refused("needs a JSON schema that all answers obey: give json_schema or response_format")
    schema = json.loads(constrained.text)
    resolved = _resolved(schema, schema)
    properties = resolved.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        raise _refused("needs a schema of objects that names its properties at the top")
    return tuple((name, _kind(value, schema)) for name, value in properties.items())


def spread_values(answer: Any, columns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The values of a parsed answer for these columns; None for those that it lacks or that do not fit."""
    values = answer if isinstance(answer, Mapping) else {}
    return {name: fits(values.get(name), kind) for name, kind in columns}


def _kind(schema: Any, root: Mapping[str, Any]) -> str:
    """The kind of a column whose values obey a schema; JSON if no other is sure to hold them."""
    found = _kinds(schema, root, _MOST_REFERENCES) - {None}
    if found == {WHOLE, NUMBER}:
        return NUMBER
    return str(found.pop()) if len(found) == 1 else JSON


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str | None]:
    """The kinds of all values that a schema may allow; None for null."""
    resolved = _resolved(schema, root)
    if depth == 0:
        return {JSON}
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := resolved.get(key), list):
            return set().union(*(_kinds(part, root, depth - 1) for part in parts))
    if "const" in resolved:
        return {_kind_of(resolved["const"])}
    if isinstance(values := resolved.get("enum"), list):
        return {_kind_of(value) for value in values}
    said = resolved.get("type")
    types = said if isinstance(said, list) else [said]
    return {None if one == "null" else _KINDS.get(str(one), JSON) for one in types}


def _kind_of(value: Any) -> str | None:
    if value is None:
        return None
    kinds = {str: TEXT, bool: BOOLEAN, int: WHOLE, float: NUMBER}
    return kinds.get(type(value), JSON)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the definition within the same document that it refers to."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        schema = target
    return {}


def _refused(said: str) -> InvalidParameterError:
    return InvalidParameterError(f"spread: {said}", field="spread")
