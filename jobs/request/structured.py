"""Parsing of constraints on answers (structured output), in each form that callers use, into `Constrained`.

Checked here is everything that does not need the workers' parser: types, sizes, and schema keywords that no
worker can enforce. Other problems are found by a worker and become an error of that job.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from nightmill.jobs.base.contract import Constrained, ConstraintKind, unstorable
from nightmill.jobs.errors import InvalidParameterError, RowCode
from nightmill.jobs.request.closing import closed
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.schemas import check_schema

MAX_BYTES = 256 << 10
"""Largest schema or grammar, or all choices together, in bytes."""
MAX_REGEX = 8_192  # characters
MAX_CHOICES = 10_000

_ANY_OBJECT = {"type": "object"}
_RESPONSE_FORMATS = "text, json_object, json_schema"


class ConstraintField(NamedTuple):
    """A field that constrains the answer."""

    type: Any
    says: str
    read: Callable[[str, Any], Constrained | None]
    """Parses (name, value); raises InvalidParameterError. None: the answer is not constrained."""


def constrained_by(forms: Mapping[str, Any]) -> Constrained | None:
    """Parse constraint fields, of which at most one may be given; raises InvalidParameterError."""
    first, *others = forms
    if others:
        raise _bad(others[0], f"contradicts {first}; give one of them")
    return CONSTRAINT_FIELDS[first].read(first, forms[first])


def _response_format(name: str, value: Any) -> Constrained | None:
    """Parse OpenAI's shapes, or a model of pydantic."""
    if _is_model(value):
        return _json_schema(name, value)
    if not isinstance(value, Mapping):
        raise _bad(name, f"must be an object with a type, not {json_type(value)}")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        said = f"must be one of {_RESPONSE_FORMATS} (got {str(kind)[:100]!r})"
        raise _bad(f"{name}.type", said, RowCode.UNSUPPORTED_FIELD)
    allowed = {"text": {"type"}, "json_object": {"type", "schema"}}.get(
        kind, {"type", "json_schema", "schema"}
    )
    _only(value, allowed, name)
    if kind == "text":
        return None
    if value.get("schema") is not None:  # the form of llama.cpp and others
        if value.get("json_schema") is not None:
            raise _bad(f"{name}.schema", "contradicts json_schema; give one of them")
        return _json_schema(f"{name}.schema", value["schema"])
    if kind == "json_object":
        return _schema(name, _ANY_OBJECT)
    place, wrapped = f"{name}.json_schema", value.get("json_schema")
    if not isinstance(wrapped, Mapping):
        raise _bad(place, f"must be an object with a schema, not {json_type(wrapped)}")
    _only(wrapped, {"name", "description", "schema", "strict"}, place)
    if not isinstance(wrapped.get("strict"), bool | None):
        raise _bad(f"{place}.strict", "must be true or false")
    return _json_schema(f"{place}.schema", wrapped.get("schema"))


def _json_schema(name: str, value: Any) -> Constrained:
    if _is_model(value):
        try:
            value = value.model_json_schema()
        except PydanticUserError as error:  # for example a field whose type JSON lacks
            raise _bad(name, f"has no JSON schema: {error.message}") from None
    if not isinstance(value, Mapping):
        raise _bad(name, f"must be an object, not {json_type(value)}")
    return _schema(name, value)


def _schema(name: str, schema: Mapping[str, Any]) -> Constrained:
    """Its objects are closed here and not by workers: so a row says what its answer is held to."""
    text = _json(name, schema)
    _check_text(name, text)
    try:
        check_schema(schema)
    except ValueError as error:
        raise _bad(name, str(error)) from None
    return Constrained(ConstraintKind.JSON_SCHEMA, _json(name, closed(json.loads(text))))


def _json(name: str, schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(name, f"is not JSON: {error}") from None


def _regex(name: str, value: Any) -> Constrained:
    text = _text(name, value)
    if len(text) > MAX_REGEX:
        raise _bad(name, f"has {len(text):,} characters, more than {MAX_REGEX:,}; simplify it")
    return Constrained(ConstraintKind.REGEX, text)


def _grammar(name: str, value: Any) -> Constrained:
    return Constrained(ConstraintKind.GRAMMAR, _text(name, value))


def _choice(name: str, value: Any) -> Constrained:
    choices = [value] if isinstance(value, str) else value
    if not isinstance(choices, list | tuple):
        raise _bad(name, f"must be a list of texts, not {json_type(value)}")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise _bad(name, f"must have 1 to {MAX_CHOICES:,} texts (got {len(choices):,})")
    for number, choice in enumerate(choices, 1):
        if not isinstance(choice, str):
            raise _bad(name, f"must be a list of texts, but item {number} is {json_type(choice)}: quote it")
        _text(name, choice)
    text = json.dumps(choices, ensure_ascii=False, separators=(",", ":"))
    _check_text(name, text)
    return Constrained(ConstraintKind.CHOICE, text)


CONSTRAINT_FIELDS: dict[str, ConstraintField] = {
    "response_format": ConstraintField(
        Mapping[str, Any],
        'Constraint on the answer, in the form of OpenAI: \'{"type": "json_object"}\'.',
        _response_format,
    ),
    "json_schema": ConstraintField(
        Mapping[str, Any], "The answer must be JSON that obeys this schema.", _json_schema
    ),
    "regex": ConstraintField(str, "The whole answer must match this regular expression.", _regex),
    "choice": ConstraintField(tuple[str, ...], "The answer must be one of these texts.", _choice),
    "grammar": ConstraintField(
        str, "The answer must follow this grammar, in Lark's syntax or GBNF.", _grammar
    ),
}
"""Constraint fields by name."""


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, f"must be a text, not {json_type(value)}")
    if not value:
        raise _bad(name, "must be a text that is not empty")
    _check_text(name, value)
    return value


def _check_text(name: str, text: str) -> None:
    if problem := unstorable(text):
        raise _bad(name, problem)
    size = len(text.encode())
    if size > MAX_BYTES:
        raise _bad(name, f"has {size:,} bytes, more than {MAX_BYTES:,}; simplify it")


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _only(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name, said in value.items():
        if name not in known and said is not None:
            why = f"is not supported: remove it; known are {', '.join(sorted(known))}"
            raise _bad(f"{place}.{name}", why, RowCode.UNSUPPORTED_FIELD)


def _bad(place: str, said: str, code: RowCode = RowCode.INVALID_VALUE) -> InvalidParameterError:
    return InvalidParameterError(f"{place}: {said}", field=place, code=code)
