"""An answer is one of its schema: a search for one that is not, among schemas on which parsers stumble."""

import decimal
import json
import os
import random
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from llguidance import LLMatcher

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.grammar.checker import Checker, CheckerLimits
from nightmill.worker.grammar.patterns import for_strings
from nightmill.worker.grammar.source import complete
from tests.support.walking import BYTES, accepts, exact_json, matcher_of, validator, walk

ROUNDS = int(os.environ.get("NIGHTMILL_TEST_SCHEMA_SEARCH", "150"))
"""Schemas that are tried of each kind; a search of its own takes 10,000."""
_TEXTS = ["a", "b", "ab", "é", "prénom", "x-1", "", 'q"q', "b\\s", "a/b", "A", "1", "\U0001f600"]
_PATTERNS = [
    "^a$", "a", "^[ab]$", "^x-", "^.$", "[0-9]+", "^(a|b)$", "é", "^$", "^a", "b$", r"\d", r"\w{1,3}", ".",
    'q"q', '^[^"]*$', r"^[^\\]*$", r"^[^\"\\]{1,3}$", r"^\S+$", r"^[\x00-!]$", r"^[a&&b]$", r"^[[a]$", r"\s",
]  # fmt: skip
_NUMBERS = [
    0, 1, -1, 0.5, -0.5, 0.05, 1e-7, 0.1, 7.0, 2**53, 2**53 + 1, -(2**53) - 1, 2**60 + 1, 2**63 - 1,
    -(2**63), 2**64, 123456789012345678, 10**30, 1e308, -1e308, 1.0829590968588954e-09, 0.9269085253146903,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _many_digits() -> Iterator[None]:
    with decimal.localcontext(decimal.Context(prec=2_000, traps=[])):
        yield


def number(draw: random.Random) -> float:
    match draw.randrange(6):
        case 0:
            return draw.choice(_NUMBERS)
        case 1:
            return draw.randrange(-(10 ** draw.randrange(1, 20)), 10 ** draw.randrange(1, 20))
        case 2:
            return round(draw.uniform(-5, 5), draw.randrange(4))
        case 3:
            return draw.uniform(-1, 1) * 10.0 ** draw.randrange(-9, 9)
        case 4:
            return draw.randrange(2**53 - 5, 2**53 + 50) * draw.choice([1, -1, 8, 100])
        case _:
            return draw.randrange(-20, 20)


def numeric(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["integer", "number", ["number", "null"], ["integer", "string"]])
    made: dict[str, Any] = {"type": kind}
    for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw.random() < 0.45:
            made[bound] = number(draw)
    if draw.random() < 0.15:
        made["multipleOf"] = draw.choice([2, 3, 0.5, 0.1, 0.01, 0.25, 7, 0.07])
    if draw.random() < 0.1:
        return {"allOf": [made, {"minimum": number(draw)}]}
    if draw.random() < 0.15:
        return draw.choice([{"const": number(draw)}, {"enum": [number(draw), number(draw)]}])
    return made


def leaf(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(8):
        case 0:
            return {"type": "string", "maxLength": draw.randrange(4)}
        case 1:
            return {"enum": draw.sample(["x", "yy", 1, True, None, "é\n", 0.5, [1], {"k": 1}], 2)}
        case 2:
            return {"const": draw.choice(_TEXTS)}
        case 3:
            return {"type": "string", "format": draw.choice(["date", "time", "date-time", "uuid", "ipv4"])}
        case 4 | 5:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 6:
            return {"type": ["integer", "null"]}
        case _:
            return {}


def nested(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or draw.random() < 0.25:
        return leaf(draw)
    match draw.randrange(7):
        case 0 | 1 | 2:
            return an_object(draw, depth)
        case 3:
            return {"type": "array", "items": nested(draw, depth - 1), "maxItems": draw.randrange(3)}
        case 4:
            first = [nested(draw, depth - 1) for _ in range(draw.randrange(1, 3))]
            return {"type": "array", "prefixItems": first, "items": draw.choice([False, leaf(draw)])}
        case 5:
            return {"anyOf": [nested(draw, depth - 1) for _ in range(2)]}
        case _:
            return {"allOf": [nested(draw, depth - 1), nested(draw, depth - 1)]}


def an_object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_TEXTS, draw.randrange(4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: nested(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
    }
    if draw.random() < 0.5:
        made["patternProperties"] = {
            pattern: nested(draw, depth - 1) for pattern in draw.sample(_PATTERNS, draw.randrange(1, 3))
        }
    if draw.random() < 0.7:
        made["additionalProperties"] = draw.choice([False, False, True, leaf(draw)])
    if draw.random() < 0.15:
        made["minProperties"] = draw.randrange(3)
    return made


@pytest.mark.parametrize("kind", [numeric, lambda draw: nested(draw, 3)], ids=["numbers", "structures"])
def test_no_walk_through_a_schema_ends_in_what_it_forbids(kind: Any) -> None:
    draw = random.Random(33)
    compiled = ended = 0
    for _ in range(ROUNDS):
        schema = kind(draw)
        try:
            matcher = matcher_of(schema)
        except (InvalidParameterError, ValueError):
            continue
        compiled += 1
        judge = validator(schema)
        for _ in range(8):
            try:
                text = walk(matcher, draw, 150)
            except AssertionError:
                # A key that no name and no pattern allows; the process that checks takes such patterns out.
                assert "patternProperties" in json.dumps(schema) or "multipleOf" in schema
                continue
            if text is not None:
                ended += 1
                judge.validate(exact_json(text))
    assert compiled > ROUNDS // 3 and ended > 2 * compiled


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "enum": [123456789012345678]},
        {"const": 2**53 + 1},
        {"enum": [0.9269085253146903]},
        {"properties": {"id": {"const": {"deep": [10**30]}}}},
        {"const": "a\x01b"},
        {"const": {"a\x00b": 1}},
        {"type": "integer", "minimum": 2**63},
        {"maximum": -(10**19)},
        {"type": "object", "minProperties": 2},
        {"properties": {"a\nb": {}}},
        {"$defs": {"a": {"$anchor": "x", "const": 2**53 + 1}}, "$ref": "#x"},
    ],
)
def test_what_cannot_be_said_exactly_is_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidParameterError, match=r"json_schema: .* at #.*(:|;) |json_schema: the property"
    ):
        matcher_of(schema)


@pytest.mark.parametrize("pattern", [r"^a\x01b$", "^a\x7fb$", r"^a[\x01]b$", r"[\P{L}a]", r"\a"])
def test_patterns_that_cannot_be_said_exactly_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"leave it out|write the class without it"):
        for_strings(pattern)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.05}, ["0.05", "0.001"], ["0", "0.0", "0.06"]),
        ({"type": "number", "exclusiveMaximum": -3, "minimum": -3.5}, ["-3.5", "-3.01"], ["-3", "-3.0"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", str(2**62)], [str(2**63)]),
        ({"type": "number", "minimum": -1e308, "maximum": 1e308}, ["-7.5"], ["1e999"]),
        ({"type": "integer", "exclusiveMinimum": 2**60}, [str(2**60 + 256)], [str(2**60), str(2**60 - 1)]),
        ({"type": "integer", "maximum": -(2**62)}, [str(-(2**62))], [str(-(2**62) + 1), "0"]),
        ({"type": "string", "pattern": '^[^"]$'}, ['"a"', '"\\\\"'], ['"\\""']),
        ({"type": "string", "pattern": r"^[^\\]$"}, ['"a"', '"\\""'], ['"\\\\"']),
        ({"type": "string", "pattern": r"^\S$"}, ['"a"'], ['"\ufeff"', '" "', '"\\""a']),
        ({"properties": {"prénom": {"type": "integer"}}}, ['{"prénom":3}'], ['{"pr\\u00e9nom":"Al"}']),
        ({"properties": {"a/b": {"type": "integer"}}}, ['{"a/b":3}'], ['{"a\\/b":"Al"}']),
    ],
)
def test_bounds_patterns_and_keys_hold(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    matcher = matcher_of(schema)
    assert [text for text in good if not accepts(matcher, text)] == []
    assert [text for text in bad if accepts(matcher, text)] == []


def test_dates_are_those_of_the_calendar() -> None:
    matcher = matcher_of({"type": "string", "format": "date"})
    for year in (1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                    exists = True
                except ValueError:
                    exists = False
                assert accepts(matcher, f'"{text}"') == exists, text
    assert not accepts(matcher, '"0000-01-01"')
    times = matcher_of({"type": "string", "format": "date-time"})
    assert accepts(times, '"2024-02-29T23:59:59.5+01:00"')
    assert not accepts(times, '"2023-02-29T23:59:59Z"') and not accepts(times, '"2023-02-28T23:59:60Z"')


def test_patterns_of_keys_that_match_named_properties_alone_lead_to_no_dead_end() -> None:
    schemas: list[dict[str, Any]] = [
        {"properties": {"a": {"type": "integer"}, "b": {}}, "patternProperties": {"^(a|b)$": {}}},
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {}}, "required": ["a"]},
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^ab?$": {}}, "required": ["a"]},
    ]
    checker, draw = Checker(CheckerLimits()), random.Random(5)
    try:
        for schema in schemas:
            schema |= {"type": "object", "additionalProperties": False}
            asked = constrained_by({"json_schema": schema})
            assert asked is not None
            matcher = LLMatcher(BYTES, complete(checker.check(asked)), log_level=0)
            texts = [walk(matcher, draw, 150) for _ in range(300)]  # raises at a dead end
            assert any(text and b"a" in text for text in texts)
    finally:
        checker.close()
