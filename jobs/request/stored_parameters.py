"""Generation parameters as rows store them, and read back from there."""

from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.request.parameters import DEFAULTS, GenerationParams

_LATER = (
    "stop_token_ids", "min_tokens", "n", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "logprobs", "echo", "score", "include_stop_str_in_output", "prompt_logprobs", "return_token_ids",
    "truncate_prompt_tokens", "max_reasoning_tokens", "embed", "dimensions", "pooling",
    "rerank", "instruction",
)  # fmt: skip
"""Parameters added after the first version."""


def stored(params: GenerationParams) -> JsonObject:
    """Return the JSON object that a row stores; the seed has its own column.

    Newer parameters are omitted unless set. So a worker of an older version runs what it can, and the
    fingerprint of a job that an older version entered stays the same.
    """
    return dict(_stored(_Same(params)))


def from_stored(values: Any) -> GenerationParams:
    """Read a stored object for display, unchecked, and without parameters of other versions."""
    fields = GenerationParams.model_fields
    known = {name: values[name] for name in fields if name in values} if isinstance(values, dict) else {}
    try:
        return GenerationParams.model_validate(known)
    except ValidationError:
        return GenerationParams.model_construct(**known)


class _Same:
    """Parameters by which something is remembered: those are meant, and no others that equal them."""

    __slots__ = ("params",)

    def __init__(self, params: GenerationParams) -> None:
        self.params = params

    def __hash__(self) -> int:
        return id(self.params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.params is other.params


@lru_cache(maxsize=128)
def _stored(same: _Same) -> JsonObject:
    """Build what a row stores; most rows of a batch have the same parameters."""
    params = same.params
    values = params.model_dump(mode="json", exclude={"seed"})
    for name in _LATER:
        if getattr(params, name) == getattr(DEFAULTS, name):
            del values[name]
    return values
