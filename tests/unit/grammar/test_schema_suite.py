"""JSON Schema's own test suite: a schema is refused with a sentence, or takes no answer that it forbids."""

import decimal
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validators
from llguidance import LLMatcher

from nightmill.jobs.errors import ConstraintError, InvalidParameterError
from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.grammar.checker import Checker, CheckerLimits, ParserLimits
from nightmill.worker.grammar.source import complete
from tests.support.needs import Need, missing
from tests.support.thinning import thinned
from tests.support.walking import BYTES, accepts, exact_json, matcher_of, validator, walk

pytestmark = pytest.mark.heavy

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
WALKS, MOST = int(os.environ.get("NIGHTMILL_TEST_SUITE_WALKS", "3")), 80
ANNOTATIONS = "content.json"
"""Cases of the encoding and the type of a text's content, which are annotations since 2019-09."""


@pytest.fixture(scope="module")
def suite() -> Path:
    """The folder of the suite, if `make schemas` has fetched it."""
    if named := os.environ.get("NIGHTMILL_TEST_SCHEMA_SUITE"):
        return Path(named)
    found = Path(__file__).parents[3] / ".venv" / "schemas"
    return found if found.exists() else missing(Need.SCHEMAS)


@pytest.fixture(autouse=True)
def _many_digits() -> Iterator[None]:
    with decimal.localcontext(decimal.Context(prec=2_000, traps=[])):
        yield


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], dict):
                yield file.name, case


def forbidden(name: str, case: dict[str, Any]) -> Iterator[str]:
    """Instances that the suite calls invalid, as answers."""
    for test in case["tests"]:
        if not test["valid"] and name != ANNOTATIONS:
            yield json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("draft", thinned(DRAFTS, 2))
def test_no_answer_is_one_that_the_suite_forbids(draft: str, suite: Path) -> None:
    draw, counts = random.Random(33), Counter[str]()
    checker = Checker(CheckerLimits())
    try:
        for name, case in cases(suite / draft):
            try:
                asked = constrained_by({"json_schema": case["schema"]})
                assert asked is not None
                lark = checker.check(asked)
            except (InvalidParameterError, ConstraintError) as error:
                assert re.fullmatch(r"(json_schema: )?[^\n]{10,700}", str(error)), str(error)
                counts["refused"] += 1
                continue
            matcher = LLMatcher(BYTES, complete(lark), log_level=0, limits=ParserLimits().build())
            counts["compiled"] += 1
            said = f"{name}: {case['description']}"
            assert [text for text in forbidden(name, case) if accepts(matcher, text)] == [], said
            judge = validator(case["schema"], validators.validator_for(case["schema"], judges(draft)))
            for _ in range(0 if "\\p" in asked.text else WALKS):  # Python has no classes by name
                text = walk(matcher, draw, MOST)  # raises at a dead end
                if text is not None:
                    counts["ended"] += 1
                    judge.validate(exact_json(text))
    finally:
        checker.close()
    assert counts["compiled"] > counts["refused"] and counts["ended"] > counts["compiled"], counts


def judges(draft: str) -> Any:
    return validators.validator_for({"$schema": DRAFTS[draft]})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"if": {"const": 1}, "then": {}, "else": False, "not": {}}, None, None),
        ({"then": False, "minContains": 3, "uniqueItems": False, "dependentRequired": {}}, ["[1,1]"], []),
        ({"if": False, "propertyNames": True, "unevaluatedItems": {}}, ['{"a":1}'], []),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            ['{"a":1}', "{}"], ['{"b":1}'],
        ),
        ({"type": "object", "additionalProperties": {}, "unevaluatedProperties": False}, ['{"b":1}'], []),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1,2]"]),
        ({"type": "array", "items": {}, "unevaluatedItems": False}, ["[1,2]"], []),
        ({"type": "string", "maxLength": 2.0, "minLength": 1.0}, ['"ab"'], ['""', '"abc"']),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, None, None),
        ({"allOf": [{"$id": "b", "$ref": "c.json"}]}, None, None),
    ],
)  # fmt: skip
def test_keywords_count_only_where_they_say_something(
    schema: dict[str, Any], good: list[str] | None, bad: list[str] | None
) -> None:
    if good is None or bad is None:
        with pytest.raises(InvalidParameterError, match=r"json_schema: .* at #"):
            constrained_by({"json_schema": schema})
        return
    matcher = matcher_of(schema)
    assert [text for text in good if not accepts(matcher, text)] == []
    assert [text for text in bad if accepts(matcher, text)] == []
