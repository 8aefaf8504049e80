"""Random walks through a grammar, and a validator that judges their ends exactly."""

import json
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError, validators
from llguidance import LLMatcher, LLTokenizer

from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.grammar.checker import ParserLimits
from nightmill.worker.grammar.source import complete, lark_of

BYTES = LLTokenizer("byte")
_CLOSING = frozenset(b'"}]')
_USUAL = frozenset(b'"}],:0123456789abtruefalsn{[.-\\')


def matcher_of(schema: Mapping[str, Any]) -> LLMatcher:
    """A matcher of bytes; raises InvalidParameterError or ValueError for a schema that is refused."""
    asked = constrained_by({"json_schema": schema})
    assert asked is not None
    matcher = LLMatcher(BYTES, complete(lark_of(asked)), log_level=0, limits=ParserLimits().build())
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def walk(matcher: LLMatcher, draw: random.Random, most: int) -> bytes | None:
    """A text to its end; None if it is not over after `most` bytes. Raises AssertionError at a dead end."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < most:
        accepting = matcher.is_accepting()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [int(one) for one in np.flatnonzero(np.unpackbits(mask, bitorder="little")) if one < 256]
        if accepting and (not allowed or draw.random() < 0.3):
            return bytes(text)
        assert allowed, f"nothing can follow {bytes(text)!r}: {matcher.get_error()}"
        closing = [one for one in allowed if one in _CLOSING]
        usual = [one for one in allowed if one in _USUAL]
        if closing and draw.random() < len(text) / 150:
            chosen = draw.choice(closing)
        else:
            chosen = draw.choice(usual if usual and draw.random() < 0.9 else allowed)
        assert matcher.consume_token(chosen)
        text.append(chosen)
    return None


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether this is a whole answer."""
    matcher, data = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def exact_json(text: str | bytes) -> Any:
    """A value whose numbers have all their digits; of keys that repeat, the last counts."""
    return json.loads(text, parse_float=Decimal)


def validator(schema: Mapping[str, Any], draft: Any = Draft202012Validator) -> Any:
    """Judges values of `exact_json`; `\\d` and `\\w` are ASCII, as in ECMAScript."""
    exact = exact_json(json.dumps(schema))
    return validators.extend(draft, _KEYWORDS)(exact, format_checker=draft.FORMAT_CHECKER)


def _matches(pattern: str, text: str) -> bool:
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # `&&` and `[[` are characters here
        return re.search(pattern, text, re.ASCII) is not None


def _pattern(judge: Any, pattern: str, value: Any, _: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _matches(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(judge: Any, patterns: Any, value: Any, _: Any) -> Iterator[ValidationError]:
    for pattern, schema in patterns.items() if isinstance(value, dict) else ():
        for key, one in value.items():
            if _matches(pattern, key):
                yield from judge.descend(one, schema)


def _additional_properties(judge: Any, schema: Any, value: Any, around: Any) -> Iterator[ValidationError]:
    patterns = around.get("patternProperties", {})
    for key, one in value.items() if isinstance(value, dict) else ():
        if key not in around.get("properties", {}) and not any(_matches(p, key) for p in patterns):
            yield from judge.descend(one, schema)


_KEYWORDS: Any = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
