"""Rows of OpenAI's batch format: what is supported, what is ignored, and what is an error of its row.

The keys are those of OpenAI's API reference for POST /v1/chat/completions and /v1/completions, and our own
parameters that it lacks. A key that would change the answer and that we cannot follow is refused by name;
one that only concerns OpenAI's service is ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

from nightmill.jobs.contract import GenerationParams, JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.messages import json_type, normalise
from nightmill.jobs.formats.plain import unknown_key
from nightmill.jobs.formats.rows import RowCode, RowRefusedError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_OWN = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos"})
_PARAMETERS = frozenset({"max_tokens", "temperature", "top_p", "seed", "stop", "model"}) | _OWN
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options", "parallel_tool_calls",
    }
)  # fmt: skip
"""Keys of a body that are accepted and have no effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Keys of a body that may be null or have these values, with which they have no effect."""
_REMEDIES = {
    "n": "give a row for each answer, with seeds of their own",
    "best_of": "give a row for each answer, with seeds of their own",
    "stream": "results are written as they finish",
}
_BODY = {
    CHAT: _PARAMETERS | IGNORED | NEUTRAL.keys() | {"messages", "max_completion_tokens"},
    COMPLETIONS: _PARAMETERS | IGNORED | NEUTRAL.keys() | {"prompt"},
}


def split_openai(values: JsonObject) -> tuple[Any, JsonObject]:
    """An OpenAI row as (prompt, keywords of enqueue). Raises RowRefusedError, InvalidRequestError."""
    for name in ("method", "url", "body"):
        if values.get(name) is None:
            raise RowRefusedError(
                RowCode.MISSING_FIELD,
                f'{name}: is missing; a row has custom_id, method "POST", url, body',
                name,
            )
    for name in values:
        if name not in ("method", "url", "body"):
            raise unknown_key(name, {}, frozenset({"custom_id", "method", "url", "body"}))
    method, url, body = values["method"], values["url"], values["body"]
    if method != "POST":
        raise RowRefusedError(RowCode.INVALID_VALUE, f'method: must be "POST" (got {method!r})', "method")
    if not isinstance(url, str) or url not in _BODY:
        raise RowRefusedError(
            RowCode.INVALID_VALUE, f"url: must be {CHAT} or {COMPLETIONS} (got {url!r})", "url"
        )
    if not isinstance(body, Mapping):
        raise RowRefusedError(
            RowCode.INVALID_VALUE, f"body: must be an object, not {json_type(body)}", "body"
        )
    given = {name: value for name, value in body.items() if value is not None}
    settings = _settings(given, url)
    if url == CHAT:
        return normalise(_required(given, "messages"), "body.messages"), settings
    prompt = _required(given, "prompt")
    if not isinstance(prompt, str):
        raise RowRefusedError(
            RowCode.INVALID_VALUE,
            f"body.prompt: must be a text, not {json_type(prompt)}; give each prompt a row of its own",
            "body.prompt",
        )
    return prompt, settings


def _required(given: JsonObject, name: str) -> Any:
    if name not in given:
        raise RowRefusedError(RowCode.MISSING_FIELD, f"body.{name}: is missing", f"body.{name}")
    return given[name]


def _settings(given: JsonObject, url: str) -> JsonObject:
    settings: JsonObject = {}
    for name, value in given.items():
        if name not in _BODY[url]:
            raise unknown_key(name, {}, _BODY[url], "body.")
        if name in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            remedy = _REMEDIES.get(name, "remove it")
            raise RowRefusedError(
                RowCode.UNSUPPORTED_FIELD,
                f"body.{name}: {_short(value)} is not supported; {remedy}",
                f"body.{name}",
            )
        if name in _PARAMETERS:
            settings[name] = value
    if "max_completion_tokens" in given:
        settings["max_tokens"] = _limit(given)
    return settings


def _limit(given: JsonObject) -> int:
    """OpenAI's later name for max_tokens of a chat."""
    field = "body.max_completion_tokens"
    limit = given["max_completion_tokens"]
    try:
        GenerationParams.parse({"max_tokens": limit})
    except InvalidRequestError as error:
        said = str(error).removeprefix("max_tokens")
        raise RowRefusedError(RowCode.INVALID_VALUE, f"{field}{said}", field) from None
    if given.get("max_tokens", limit) != limit:
        raise RowRefusedError(
            RowCode.INVALID_VALUE, f"{field}: contradicts max_tokens; give one of them", field
        )
    return int(limit)


def _same(value: Any, neutral: Any) -> bool:
    # In Python True equals 1, in JSON it does not.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | int | float) else json_type(value)
