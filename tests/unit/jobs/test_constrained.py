"""What may be said about what an answer must be: one field of a job, in whichever words it was said."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from nightmill.jobs.base.contract import Constrained, ConstraintKind, JobState, StopReason
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.closing import closed
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.schemas import MAX_DEPTH, REFUSED
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.structured import MAX_BYTES, MAX_CHOICES, MAX_REGEX


class Person(BaseModel):
    name: str
    tags: list[str] = []


def constrained(**settings: Any) -> Constrained | None:
    return JobSpec.parse({"prompt": "x", **settings}).constrained


def refused(**settings: Any) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        constrained(**settings)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    return str(caught.value)


def test_every_form_becomes_a_kind_and_a_text() -> None:
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    text = '{"type":"object","properties":{"ü":{"type":"integer"}},"additionalProperties":false}'
    expected = Constrained(ConstraintKind.JSON_SCHEMA, text)
    wrapped = {"name": "x", "description": "d", "strict": True, "schema": schema}
    assert constrained(json_schema=schema) == expected
    assert constrained(response_format={"type": "json_schema", "json_schema": wrapped}) == expected
    assert constrained(response_format={"type": "json_object"}) == Constrained(
        ConstraintKind.JSON_SCHEMA, '{"type":"object"}'
    )
    assert constrained(regex="a+") == Constrained(ConstraintKind.REGEX, "a+")
    assert constrained(choice=["a", "ü"]) == Constrained(ConstraintKind.CHOICE, '["a","ü"]')
    assert constrained(choice="a") == Constrained(ConstraintKind.CHOICE, '["a"]')
    assert constrained(grammar='start: "a"') == Constrained(ConstraintKind.GRAMMAR, 'start: "a"')
    assert constrained(response_format={"type": "text"}) is None
    assert constrained(regex=None, choice=None) is None


@pytest.mark.parametrize("name", ["response_format", "json_schema"])
def test_a_model_of_pydantic_is_its_schema(name: str) -> None:
    asked = constrained(**{name: Person})
    assert asked is not None and asked.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(asked.text) == closed(Person.model_json_schema())

    class Strange(BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        what: object.__class__  # type: ignore[name-defined]
        when: type[int] | complex

    assert "has no JSON schema" in refused(**{name: Strange})


def test_a_row_wins_over_its_batch_and_may_ask_for_any_text() -> None:
    batch = JobSpec.defaults({"regex": "a"})
    assert JobSpec.parse("x", batch).constrained == Constrained(ConstraintKind.REGEX, "a")
    assert JobSpec.parse({"prompt": "x", "choice": ["b"]}, batch).constrained == Constrained(
        ConstraintKind.CHOICE, '["b"]'
    )
    assert JobSpec.parse({"prompt": "x", "response_format": {"type": "text"}}, batch).constrained is None


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice: contradicts regex; give one of them"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: contradicts the constraint"),
        ({"regex": ""}, "regex: must be a text that is not empty"),
        ({"regex": 5}, "regex: must be a text"),
        ({"regex": "a" * (MAX_REGEX + 1)}, "regex: has 8,193 characters, more than 8,192; simplify it"),
        ({"regex": "\ud800"}, "regex: contains a lone surrogate"),
        ({"choice": []}, "choice: must have 1 to 10,000 texts (got 0)"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice: must have 1 to 10,000 texts (got 10,001)"),
        ({"choice": ["a", 5]}, "choice: must be a list of texts, but item 2 is a number: quote it"),
        ({"choice": 5}, "choice: must be a list of texts, not a number"),
        ({"grammar": "x" * (MAX_BYTES + 1)}, "grammar: has 262,145 bytes, more than 262,144; simplify it"),
        ({"json_schema": [1]}, "json_schema: must be an object, not a list"),
        ({"json_schema": {"const": "ü" * MAX_BYTES}}, "json_schema: has 524,300 bytes"),
        ({"json_schema": {"const": float("nan")}}, "json_schema: is not JSON: "),
        ({"json_schema": {"const": {1, 2}}}, "json_schema: is not JSON: "),
        ({"json_schema": nested(MAX_DEPTH + 1)}, "json_schema: is nested more than 64 levels deep"),
        ({"json_schema": nested(100_000)}, "json_schema: is not JSON: "),
        ({"response_format": "json"}, "response_format: must be an object with a type, not a text"),
        ({"response_format": {"type": "poem"}}, "response_format.type: must be one of text, json_object"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x: is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema: must be an object, not null",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict: must be true or false",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    assert said in refused(**settings)


def test_what_is_just_within_the_bounds_is_taken() -> None:
    constrained(regex="a" * MAX_REGEX)
    constrained(choice=["a"] * MAX_CHOICES)
    constrained(json_schema=nested(MAX_DEPTH))
    constrained(grammar="x" * MAX_BYTES)


# Of each keyword a use with an effect; of the others an empty object has one.
EFFECTIVE: dict[str, Any] = {
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "then": {"then": {"minLength": 1}, "if": {"type": "string"}},
    "else": {"else": {"minLength": 1}, "if": {"type": "string"}},
    "minContains": {"minContains": 1, "contains": {"type": "string"}},
    "maxContains": {"maxContains": 1, "contains": {"type": "string"}},
    "uniqueItems": {"uniqueItems": True},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"unevaluatedProperties": {"type": "string"}},
    "unevaluatedItems": {"unevaluatedItems": {"type": "string"}},
}
WITHOUT_EFFECT = [
    {"if": {"type": "string"}}, {"then": {"minLength": 1}}, {"else": {"minLength": 1}}, {"minContains": 1},
    {"maxContains": 1}, {"uniqueItems": False}, {"dependentRequired": {}}, {"dependentSchemas": {}},
    {"dependencies": {}}, {"propertyNames": True}, {"unevaluatedProperties": {}}, {"unevaluatedItems": True},
    {"not": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", WITHOUT_EFFECT, ids=lambda schema: next(iter(schema)))
def test_keywords_that_say_nothing_where_they_stand_are_taken(schema: dict[str, Any]) -> None:
    constrained(json_schema=schema)
    constrained(json_schema={"properties": {"a": schema}})


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_keywords_that_cannot_be_enforced_are_named_wherever_the_schema_comes_to_them(keyword: str) -> None:
    bad = EFFECTIVE.get(keyword, {keyword: {}})
    for schema, place in (
        (bad, "#"),
        ({"properties": {"a": {"items": bad}}}, "#/properties/a/items"),
        ({"anyOf": [{}, {"additionalProperties": bad}]}, "#/anyOf/1/additionalProperties"),
        ({"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": bad}}, "#/$defs/a~1b"),
    ):
        said = refused(json_schema=schema)
        assert any(f"the keyword {name!r} at {place} cannot be enforced" in said for name in bad)


def test_names_and_values_that_look_like_keywords_are_none() -> None:
    constrained(json_schema={"properties": {"not": {"const": {"if": 1}}, "contains": {"enum": [{"not": 1}]}}})
    constrained(json_schema={"$defs": {"unused": {"not": {}}}, "default": {"uniqueItems": True}})
    constrained(json_schema={"$defs": {"loop": {"$ref": "#/$defs/loop"}}, "$ref": "#/$defs/loop"})


def test_jobs_without_one_keep_the_fingerprint_that_they_had() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def fingerprint(**settings: Any) -> str:
        spec = JobSpec.parse({"prompt": "x", "seed": 1, "idempotency_key": "k", **settings})
        return str(spec.row("1" * 32, now, 3)["fingerprint"])

    assert fingerprint() == "107c9c95c2a90ced336d9a8ea2d0f26d8a155940fec2264e67840b2f6725221d"
    assert (
        len({fingerprint(), fingerprint(regex="a"), fingerprint(regex="b"), fingerprint(choice=["a"])}) == 4
    )


@pytest.mark.parametrize(
    ("kind", "text", "reason", "parsed"),
    [
        (ConstraintKind.JSON_SCHEMA, '{"a": [1]}', StopReason.EOS, {"a": [1]}),
        (ConstraintKind.JSON_SCHEMA, '{"a": [1', StopReason.LENGTH, None),
        (ConstraintKind.JSON_SCHEMA, "12", StopReason.LENGTH, None),
        (ConstraintKind.JSON_SCHEMA, None, None, None),
        (ConstraintKind.REGEX, "12", StopReason.EOS, None),
        (None, "12", StopReason.EOS, None),
    ],
)
def test_parsed_is_the_value_of_a_whole_answer(
    kind: ConstraintKind | None, text: str | None, reason: StopReason | None, parsed: Any
) -> None:
    job = Job(
        id="1", state=JobState.SUCCEEDED, prompt="x", messages=None, params=GenerationParams(), text=text,
        stop_reason=reason, constrained=None if kind is None else Constrained(kind, "{}"),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert job.parsed == parsed
