"""Requests for embeddings in OpenAI's format: supported and ignored keys, and the jobs that they become."""

from collections.abc import Mapping
from typing import Any, Final

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.neutral import short
from nightmill.jobs.formats.results import BASE64, ENCODING
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.prompts import is_id, json_type
from nightmill.jobs.request.spec import JobSpec

__all__ = ["EMBEDDINGS", "EMBEDDING_KEYS", "ENCODINGS", "MAX_INPUTS", "embedding_jobs"]

EMBEDDINGS: Final = "/v1/embeddings"
MAX_INPUTS: Final = 2_048
"""Most texts of one request, as in OpenAI's API."""
ENCODINGS: Final = ("float", BASE64)
_FIELDS: Final = frozenset({"model", "dimensions", "pooling", "truncate_prompt_tokens"})
_IGNORED: Final = frozenset({"user", "service_tier"})
EMBEDDING_KEYS: Final = _FIELDS | _IGNORED | {"input", ENCODING}


def embedding_jobs(body: Mapping[str, Any], defaults: JobSpec, **more: Any) -> list[JobSpec]:
    """Parse the body of a POST to /v1/embeddings with the fields `more`, into a job for each text.

    Raises InvalidRequestError, which names the key of the body.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in EMBEDDING_KEYS:
            raise unknown_field(name, EMBEDDING_KEYS)
    encoding = given.get(ENCODING, "float")
    if encoding not in ENCODINGS:
        raise invalid(ENCODING, f"must be {' or '.join(ENCODINGS)} (got {short(encoding)})")
    if "input" not in given:
        raise missing("input", "give a text, or a list of texts")
    fields: JsonObject = {name: value for name, value in given.items() if name in _FIELDS}
    inputs, several = _inputs(given["input"])
    specs: list[JobSpec] = []
    for number, text in enumerate(inputs):
        place = f"input[{number}]" if several else "input"
        if not isinstance(text, str) and not (isinstance(text, list) and text and is_id(text[0])):
            raise invalid(place, f"must be a text or a list of token ids, not {json_type(text)}")
        try:
            if specs:
                specs.append(specs[0].prompted(text))
            else:
                asked = {"prompt": text, "embed": True, **fields, **more}
                specs.append(JobSpec.parse(asked, defaults).for_request({ENCODING: encoding}))
        except InvalidRequestError as error:
            of_text = error.field is not None and error.field.startswith("prompt")
            raise error.renamed(place + str(error.field)[len("prompt") :]) if of_text else error from None
    return specs


def _inputs(value: Any) -> tuple[list[Any], bool]:
    """Return the texts of a request, and whether they are a list of texts."""
    if not isinstance(value, list):
        return [value], False
    if not value:
        raise invalid("input", "is empty; give a text")
    if is_id(value[0]):
        return [value], False
    if len(value) > MAX_INPUTS:
        raise invalid("input", f"has {len(value):,} texts, more than {MAX_INPUTS:,}; send several requests")
    return value, True
