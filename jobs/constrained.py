"""What may be said about what an answer must be, in each form in which callers say it, to `Constrained`.

What can be checked without the parser that workers have is checked here: types, sizes, and those keywords of
a schema that no worker can hold an answer to. The rest a worker says, as an error of that job.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from nightmill.jobs.contract import Constrained, ConstraintKind, unstorable
from nightmill.jobs.errors import InvalidParameterError, RowCode
from nightmill.jobs.prompts import json_type
from nightmill.jobs.schemas import check_schema

MAX_BYTES = 256 << 10
"""Of a schema, a grammar, or of all choices together."""
MAX_REGEX = 8_192  # characters
MAX_CHOICES = 10_000

_ANY_OBJECT = {"type": "object"}
_RESPONSE_FORMATS = "text, json_object, json_schema"


class Form(NamedTuple):
    """A keyword by which it is said what an answer must be."""

    type: Any
    says: str
    read: Callable[[str, Any], Constrained | None]
    """From the keyword's name and value; raises InvalidParameterError. None: the answer may be anything."""


def constrained_by(forms: Mapping[str, Any]) -> Constrained | None:
    """What these keywords, of which there may be one, say; raises InvalidParameterError."""
    first, *others = forms
    if others:
        raise _bad(others[0], f"contradicts {first}; give one of them")
    return FORMS[first].read(first, forms[first])


def _response_format(name: str, value: Any) -> Constrained | None:
    """OpenAI's shapes, or a model of pydantic."""
    if _is_model(value):
        return _json_schema(name, value)
    if not isinstance(value, Mapping):
        raise _bad(name, f"must be an object with a type, not {json_type(value)}")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        said = f"must be one of {_RESPONSE_FORMATS} (got {str(kind)[:100]!r})"
        raise _bad(f"{name}.type", said, RowCode.UNSUPPORTED_FIELD)
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _only(value, allowed, name)
    if kind == "text":
        return None
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
        except PydanticUserError as error:  # as for fields of types that JSON has not
            raise _bad(name, f"has no JSON schema: {error.message}") from None
    if not isinstance(value, Mapping):
        raise _bad(name, f"must be an object, not {json_type(value)}")
    return _schema(name, value)


def _schema(name: str, schema: Mapping[str, Any]) -> Constrained:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(name, f"is not JSON: {error}") from None
    _check_text(name, text)
    try:
        check_schema(schema)
    except ValueError as error:
        raise _bad(name, str(error)) from None
    return Constrained(ConstraintKind.JSON_SCHEMA, text)


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


FORMS: dict[str, Form] = {
    "response_format": Form(
        Mapping[str, Any],
        'What the answer must be, as OpenAI says it: \'{"type": "json_object"}\'.',
        _response_format,
    ),
    "json_schema": Form(Mapping[str, Any], "The answer must be JSON that obeys this schema.", _json_schema),
    "regex": Form(str, "The whole answer must match this regular expression.", _regex),
    "choice": Form(tuple[str, ...], "The answer must be one of these texts.", _choice),
    "grammar": Form(str, "The answer must follow this grammar, in Lark's syntax or GBNF.", _grammar),
}
"""By name."""


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
