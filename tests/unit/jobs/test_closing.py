"""Objects that name their properties have no others, and what a schema asked for can still be answered."""

import copy
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict

from nightmill.jobs.request.closing import closed
from tests.support.walking import accepts, matcher_of

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def places(schema: Any, place: str = "#") -> list[str]:
    """Where a schema was closed."""
    if isinstance(schema, list):
        return [one for number, part in enumerate(schema) for one in places(part, f"{place}/{number}")]
    if not isinstance(schema, dict):
        return []
    here = [place] if schema.get("additionalProperties") is False else []
    return here + [one for name, part in schema.items() for one in places(part, f"{place}/{name}")]


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (A, ["#"]),
        ({"properties": {}}, ["#"]),
        ({"type": ["object", "null"], "properties": {"x": A}}, ["#", "#/properties/x"]),
        ({"type": "array", "items": A, "prefixItems": [B]}, ["#/items", "#/prefixItems/0"]),
        ({"additionalProperties": A}, ["#/additionalProperties"]),
        ({"anyOf": [A, {"type": "null"}]}, ["#/anyOf/0"]),
        ({"allOf": [A], "title": "one"}, ["#/allOf/0"]),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a", "description": "x"}, ["#/$defs/a"]),
        ({"$defs": {"a": A}, "properties": {"x": {"$ref": "#/$defs/a"}}}, ["#", "#/$defs/a"]),
        # Open as said, or as it must be.
        ({"type": "object"}, []),
        (A | {"additionalProperties": True}, []),
        (A | {"additionalProperties": {"type": "integer"}}, []),
        (A | {"patternProperties": {"^x": {}}}, []),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, []),
        ({"properties": {"a": {}}, "minProperties": 2}, []),
        # Held together with another schema.
        ({"allOf": [A, B]}, []),
        (A | {"allOf": [B]}, []),
        (A | {"anyOf": [B, {"required": ["c"]}]}, []),
        ({"oneOf": [A, B]}, []),
        ({"oneOf": [{"type": "array", "items": A}, B]}, []),
        ({"anyOf": [A], "allOf": [B]}, []),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a", "properties": {"b": {}}}, []),
        ({"$defs": {"a": A}, "properties": {"x": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]},
         []),
        ({"$defs": {"a": {"$anchor": "x"} | A}, "$ref": "#x"}, []),
    ],
)  # fmt: skip
def test_objects_are_closed_where_nothing_else_is_said(schema: dict[str, Any], where: list[str]) -> None:
    before = copy.deepcopy(schema)
    assert places(closed(schema)) == where
    assert schema == before


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"allOf": [A, B]}, {"a": 1, "b": 2}),
        (A | {"allOf": [B]}, {"a": 1, "b": 2}),
        (A | {"anyOf": [B, {"required": ["c"]}]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, {"a": 1, "b": 2}),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a", "properties": {"b": {}}, "required": ["b"]},
         {"a": 1, "b": 2}),
        ({"oneOf": [A | {"required": []}, B]}, {"b": "x", "a": 1}),
    ],
)  # fmt: skip
def test_what_could_be_answered_still_can(schema: dict[str, Any], answer: dict[str, Any]) -> None:
    judge = Draft202012Validator(closed(schema))
    assert Draft202012Validator(schema).is_valid(answer) and judge.is_valid(answer)


def test_an_answer_ends_behind_the_properties_that_are_named() -> None:
    matcher = matcher_of(A)
    assert accepts(matcher, '{"a":1}') and not accepts(matcher, '{"a":1,"b":2}')
    assert accepts(matcher_of(A | {"additionalProperties": True}), '{"a":1,"b":2}')


def test_cases_that_exclude_each_other_are_judged_as_they_were_given() -> None:
    """Closed, both of these would let `{"b": 1}` through, of which the schema says that two cases match."""
    schema = {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    with pytest.raises(ValueError, match="oneOf"):
        matcher_of(schema)


def test_models_of_pydantic_are_closed_unless_they_allow_more() -> None:
    class Inner(BaseModel):
        x: int

    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        inner: Inner
        more: list[Inner] | None

    assert places(closed(Open.model_json_schema())) == ["#/$defs/Inner"]
