"""Which earlier answer may stand for a new one: the key of what an answer depends on.

A text is a function of the model file, the arithmetic, the rendered prompt, the parameters, the constraint
and the seed. The key covers what the row says; a worker knows the rest.
"""

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.stored_parameters import stored


class Reuse(StrEnum):
    """Which answers may stand for a job's.

    exact  those that it would compute itself, to the bit: embeddings, relevance, and answers of greedy jobs
           and of those with a seed
    any    any earlier answer to the same request of the same model
    """

    EXACT = "exact"
    ANY = "any"


def content_key(reuse: str | None, content: Mapping[str, Any], seed: int | None, realm: str) -> str | None:
    """Return the key of a row's content (32 hexadecimal digits); None if no other answer may stand for it.

    content  the columns `prompt`, `prompt_ids`, `messages`, `rendering`, `params`, `constrained`
    seed     the seed that the answer depends on; None if it will be a random one
    realm    whose answers may stand for it; see `realm_of`
    """
    if reuse is None:
        return None
    params = GenerationParams.parse(content["params"])
    if params.score or params.only_echo:
        return None  # nothing is drawn
    values = {name: content[name] for name in _CONTENT} | {"params": stored(params)}
    if reuse == Reuse.EXACT and params.temperature > 0 and not params.gives_numbers:
        if seed is None:
            return None
        values["seed"] = seed
    return realm + _digest(json.dumps(values, sort_keys=True), _DIGITS - _REALM_DIGITS)


def realm_of(owner: str | None) -> str:
    """Return what the keys of jobs of this owner, a name of a key of HTTP, begin with.

    Answers of one owner stand for no other's: who sent what, nobody else is told.
    """
    return _digest(owner or "", _REALM_DIGITS)


def realm_in(key: str) -> str:
    """Return what a key of content begins with."""
    return key[:_REALM_DIGITS]


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


_CONTENT = ("prompt", "prompt_ids", "messages", "rendering", "constrained")
_DIGITS = 32
_REALM_DIGITS = 8
