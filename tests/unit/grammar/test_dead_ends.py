"""A row whose answer cannot go on is told where, and what asks for what cannot follow."""

import json
from typing import Any

import pytest

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.worker.engine.constraints import STUCK
from nightmill.worker.grammar.dead_ends import dead_end, read_open
from nightmill.worker.grammar.exact import make_exact
from nightmill.worker.grammar.thoughts import behind_thoughts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 3, "multipleOf": 7, "title": "A"},
        "list": {"type": "array", "prefixItems": [{"const": 1}], "items": {"$ref": "#/$defs/word"}},
    },
    "patternProperties": {"^(a|list)$": {}},
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "pattern": "^x$", "maxLength": 1}},
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":7 ,', "'properties', 'patternProperties', 'additionalProperties' at # leave no way on"),
        ('{"a":', "'minimum', 'multipleOf' at #/properties/a leave no way on; loosen one of them"),
        ('{"list":[', "'const' at #/properties/list/prefixItems/0 leave"),
        ('{"list":[1, "x"', "'pattern', 'maxLength' at #/properties/list/items leave"),
        ('{"other":{"a":1', "json_schema leads there, and has no way on"),
    ],
)
def test_the_keywords_that_bind_are_named_with_their_place(text: str, said: str) -> None:
    asked = Constrained(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
    for one, written in (
        (asked, text),
        (behind_thoughts(asked, ("<think>", "</think>"), opened=True), f"{{[</think>\n{text}"),
    ):
        told = dead_end(one, written)
        assert told.startswith(STUCK) and said in told and repr(text) in told


def test_other_kinds_are_named_with_what_was_written() -> None:
    asked = Constrained(ConstraintKind.REGEX, "a")
    assert dead_end(asked, "").startswith(f"{STUCK}, at its beginning: regex leads there")
    assert f"behind '...{'b' * 60}': regex" in dead_end(asked, "b" * 200)


@pytest.mark.parametrize(
    ("text", "steps", "key_next"),
    [
        ("", [], False),
        ("[1, [2], {", [2], True),
        ('{"a\\"{": {"b": [1, ', ['a"{', "b", 1], False),
        ('{"a": {"b": 1}, "c', [], True),
        ('{"a": {"b": 1}, "c": "x,[', ["c"], False),
    ],
)  # fmt: skip
def test_open_json_is_followed(text: str, steps: list[Any], key_next: bool) -> None:
    reading = read_open(text)
    assert (reading.steps, reading.key_next) == (steps, key_next)


def test_more_patterns_than_are_looked_through_are_refused_by_name() -> None:
    schema = {"properties": {"a": {}}, "patternProperties": {f"^a{n}$": {} for n in range(65)}}
    with pytest.raises(ValueError, match="patternProperties at # is one of more than 64 patterns"):
        make_exact(schema, lambda _: True)
