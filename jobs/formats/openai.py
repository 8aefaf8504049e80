"""Rows of OpenAI's batch format: what is supported, what is ignored, and what is an error of its row.

The keys are those of OpenAI's API reference for POST /v1/chat/completions and /v1/completions, and our own
parameters that it lacks. A key that would change the answer and that we cannot follow is refused by name;
one that only concerns OpenAI's service is ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

from nightmill.jobs.constrained import FORMS
from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.fields import PARAMETERS, unknown_field
from nightmill.jobs.formats.jsonlines import parse_value
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.parameters import MAX_LOGPROBS
from nightmill.jobs.prompts import is_id, json_type
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.tools import TOOL_KEYS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_OF_LOGPROBS = frozenset({"logprobs", "top_logprobs", "echo"})
_TAKEN = PARAMETERS - _OF_LOGPROBS | FORMS.keys() | {"model"}  # OpenAI's own among them, and ours
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options", "request_id", "cache_salt",
    }
)  # fmt: skip
"""Keys of a body that are accepted and have no effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""Keys of a body that may be null or have these values, with which they have no effect."""
_OLDER = "is not supported: it is OpenAI's older word for tools; give these"
_REFUSALS = {
    "suffix": "is not supported: models here continue a prompt, and do not fill in what stands before a "
    "suffix; remove it, or describe it in the prompt",
    "reasoning_effort": "is not supported; give it in chat_template_kwargs if the model's template reads it",
    "stream": "is not supported; results are written as they finish",
    "functions": _OLDER,
    "function_call": _OLDER,
}
"""What is said of other values, and what to do."""
_LONGEST_SHOWN = 60  # characters of a value
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's keys of a body that say what the answer must be, and ours."""
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_FRAME = frozenset({"custom_id", "method", "url", "body"})
_LIMIT = "max_completion_tokens"  # OpenAI's later name for max_tokens
_BEST_OF = "best_of"  # so many answers are to be generated, of which the best n are wanted
_OF_CHATS = frozenset({*TOOL_KEYS, "chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
_BODY = {
    CHAT: _OF_CHATS
    | _TAKEN
    | _OF_LOGPROBS
    | IGNORED
    | NEUTRAL.keys()
    | _OF_LOGPROBS
    | GUIDED.keys()
    | {"messages", "structured_outputs", _LIMIT, _BEST_OF},
    COMPLETIONS: _TAKEN
    | IGNORED
    | NEUTRAL.keys()
    | _OF_LOGPROBS
    | GUIDED.keys()
    | {"prompt", "structured_outputs", _LIMIT, _BEST_OF},
}


def body_keys(url: str) -> frozenset[str]:
    """What a body that is posted to this URL may have."""
    return frozenset(_BODY[url])


def openai_job(values: JsonObject, defaults: JobSpec) -> JobSpec:
    """The job of an OpenAI row; raises InvalidRequestError."""
    body, url = _frame(values)
    try:
        return body_job(body, url, defaults, custom_id=values["custom_id"])
    except InvalidRequestError as error:
        raise error.renamed(f"body.{error.field}") from None


def body_job(body: Mapping[str, Any], url: str, defaults: JobSpec, **more: Any) -> JobSpec:
    """The job that the body of a POST to `url` (CHAT or COMPLETIONS) asks for, with `more` of its fields.

    Raises InvalidRequestError, which names the key of the body.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        spec = JobSpec.parse(_fields(given, url) | more, defaults)
        _check_best_of(given.get(_BEST_OF), spec.params.n)
        return spec
    except InvalidRequestError as error:
        renamed = error.field == "max_tokens" and _LIMIT in given
        raise error.renamed(_LIMIT) if renamed else error from None


def _frame(values: JsonObject) -> tuple[Mapping[str, Any], str]:
    """The body and the URL."""
    for name in ("method", "url", "body"):
        if values.get(name) is None:
            raise missing(name, 'a row has custom_id, method "POST", url, body')
    for name in values:
        if name not in _FRAME:
            raise unknown_field(name, _FRAME)
    method, url, body = values["method"], values["url"], values["body"]
    if method != "POST":
        raise invalid("method", f'must be "POST" (got {method!r})')
    if not isinstance(url, str) or url not in _BODY:
        raise invalid("url", f"must be {CHAT} or {COMPLETIONS} (got {url!r})")
    if not isinstance(body, Mapping):
        raise invalid("body", f"must be an object, not {json_type(body)}")
    return body, url


def _fields(given: JsonObject, url: str) -> JsonObject:
    """What a body says, as fields of a job; errors name the keys of the body."""
    for name, value in given.items():
        if name not in _BODY[url]:
            raise unknown_field(name, _BODY[url])
        if name in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            said = f"{name}: {_short(value)} {_REFUSALS.get(name, 'is not supported; remove it')}"
            raise InvalidRequestError(said, field=name, code=RowCode.UNSUPPORTED_FIELD)
    fields = {name: value for name, value in given.items() if name in _TAKEN | _OF_CHATS} | _vllm_forms(given)
    fields |= _logprobs(given, url)
    if (limit := given.get(_LIMIT)) is not None:
        if fields.setdefault("max_tokens", limit) != limit:
            raise invalid(_LIMIT, "contradicts max_tokens; give one of them")
        fields["max_tokens"] = limit
    prompt = "messages" if url == CHAT else "prompt"
    if prompt not in given:
        raise missing(prompt, f"{url} needs it")
    value = given[prompt]
    if value == []:
        raise invalid(prompt, "is empty")
    if url == COMPLETIONS and not (isinstance(value, str) or (isinstance(value, list) and _is_ids(value))):
        said = f"must be a text or a list of token ids, not {json_type(value)}"
        several = isinstance(value, list) and value and isinstance(value[0], str | list)
        raise invalid(prompt, f"{said} of prompts; give each prompt a row of its own" if several else said)
    return fields | {prompt: value}


def _logprobs(given: JsonObject, url: str) -> JsonObject:
    """What the keys of log-probabilities say, and echo, in our words."""
    wanted, likely, echo = (given.get(name) for name in ("logprobs", "top_logprobs", "echo"))
    if url == COMPLETIONS:
        if likely not in (None, 0):
            raise invalid("top_logprobs", "is for chats; give logprobs, which is a number here")
        if wanted is True:
            raise invalid("logprobs", "must be a whole number: how many of the likeliest tokens are wanted")
        return ({} if wanted is None or wanted is False else {"logprobs": wanted}) | {"echo": echo}
    if not isinstance(wanted, bool | None):
        raise invalid("logprobs", f"must be true or false, not {json_type(wanted)}; give top_logprobs, too")
    if not wanted:
        if likely not in (None, 0):
            raise invalid("top_logprobs", "needs logprobs: true")
        return {"echo": echo}
    if likely is not None and (type(likely) is not int or not 0 <= likely <= MAX_LOGPROBS):
        said = f"must be a whole number from 0 to {MAX_LOGPROBS} (got {_short(likely)})"
        raise invalid("top_logprobs", said)
    return {"logprobs": likely or 0, "echo": echo}


def _check_best_of(value: Any, wanted: int) -> None:
    """All answers that are generated are wanted: which of them are the best, nobody could say."""
    if value is None:
        return
    if type(value) is not int or value < wanted:
        raise invalid(
            _BEST_OF, f"must be a whole number of at least n, which is {wanted} (got {_short(value)})"
        )
    if value > wanted:
        raise InvalidRequestError(
            f"{_BEST_OF}: {value} is more than n, which is {wanted}: answers are not chosen here; give "
            f"n: {value} with logprobs, and choose among them",
            field=_BEST_OF,
            code=RowCode.UNSUPPORTED_FIELD,
        )


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and is_id(value[0])


def _vllm_forms(given: JsonObject) -> JsonObject:
    """What vLLM's keys say of the answer, in our words."""
    forms: JsonObject = {}
    places = {name: name for name in FORMS if name in given}  # where it was said before, by our word for it

    def add(place: str, ours: str, value: Any) -> None:
        if ours in places:
            raise invalid(place, f"contradicts {places[ours]}; give one of them")
        places[ours] = place
        forms[ours] = value

    for name, ours in GUIDED.items():
        if name in given:
            add(name, ours, _read_json(name, given[name]))
    said = given.get("structured_outputs")
    if said is None:
        return forms
    if not isinstance(said, Mapping):
        raise invalid("structured_outputs", f"must be an object, not {json_type(said)}")
    for name, value in said.items():
        place = f"structured_outputs.{name}"
        if name in _STRUCTURED and value is not None:
            add(place, _STRUCTURED[name], _read_json(place, value) if name == "json" else value)
        elif name == "json_object" and value is True:
            add(place, "response_format", {"type": "json_object"})
        elif value is not None and value is not False:
            raise unknown_field(place, {f"structured_outputs.{one}" for one in (*_STRUCTURED, "json_object")})
    return forms


def _read_json(name: str, value: Any) -> Any:
    """vLLM takes a schema as a text, too."""
    return parse_value(value) if name.endswith("json") and isinstance(value, str) else value


def _same(value: Any, neutral: Any) -> bool:
    # In Python True equals 1, in JSON it does not.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: Any) -> str:
    """A value as JSON, or in a word if that is long."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if not any(isinstance(item, Mapping | list) for item in inside):
        shown = json.dumps(value, ensure_ascii=False)
        if len(shown) <= _LONGEST_SHOWN:
            return shown
    return f"this {json_type(value).split(maxsplit=1)[1]}"  # without its article
