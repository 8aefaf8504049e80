"""Requests and rows in OpenAI's format: supported, ignored and refused keys.

The keys are those of OpenAI's API reference for POST /v1/chat/completions and /v1/completions, plus our own
parameters. An unsupported key that would change the answer is refused by name; one that only concerns
OpenAI's service is ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.formats.embedding_requests import EMBEDDINGS, embedding_jobs
from nightmill.jobs.formats.jsonlines import parse_value
from nightmill.jobs.formats.neutral import check_neutral, short
from nightmill.jobs.formats.refusals import OF_ROWS, REFUSED
from nightmill.jobs.formats.responses.request import RESPONSES, read_response
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.request.fields import PARAMETERS, unknown_field
from nightmill.jobs.request.parameters import MAX_LOGPROBS
from nightmill.jobs.request.prompts import is_id, json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.request.tools import TOOL_KEYS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)
"""Endpoints of rows."""

MAX_PROMPTS = 1_024
"""Most prompts of one request."""
MAX_REQUEST_TOKENS = 1 << 24
"""Most tokens of all answers of a request, including log-probabilities, as they form one response body."""

_OF_LOGPROBS = frozenset({"logprobs", "top_logprobs", "echo"})
_OF_EMBEDDINGS = frozenset({"embed", "dimensions", "pooling", "rerank", "instruction"})
_TAKEN = (
    PARAMETERS - _OF_LOGPROBS - _OF_EMBEDDINGS | CONSTRAINT_FIELDS.keys() | {"model"}
)  # OpenAI's and ours
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options", "request_id", "cache_salt",
        "cache_prompt", "guided_decoding_backend",
    }
)  # fmt: skip
"""Keys of a body that are accepted and have no effect."""
_NOT_TAKEN = REFUSED | OF_ROWS
NEUTRAL: dict[str, tuple[Any, ...]] = {name: refusal.neutral for name, refusal in _NOT_TAKEN.items()}
"""Values of unsupported keys, besides null, that have no effect and are accepted."""
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Our constraint fields by vLLM's keys."""
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_FRAME = frozenset({"custom_id", "method", "url", "body"})
_LIMIT = "max_completion_tokens"  # OpenAI's later name for max_tokens
_BEST_OF = "best_of"  # generate this many answers and return the best n
_OF_CHATS = frozenset(
    {
        *TOOL_KEYS, "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message",
    }
)  # fmt: skip
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
    """Return the keys that a body posted to this URL may have."""
    return frozenset(_BODY[url])


def openai_job(values: JsonObject, defaults: JobSpec) -> JobSpec:
    """Parse an OpenAI row; raises InvalidRequestError."""
    body, url = _frame(values)
    try:
        if url == RESPONSES:
            return read_response(body, defaults, custom_id=values["custom_id"]).spec
        if url == EMBEDDINGS:
            return _one("input", embedding_jobs(body, defaults, custom_id=values["custom_id"]))
        return body_job(body, url, defaults, custom_id=values["custom_id"])
    except InvalidRequestError as error:
        raise error.renamed(f"body.{error.field}") from None


def body_job(body: Mapping[str, Any], url: str, defaults: JobSpec, **more: Any) -> JobSpec:
    """Parse the body of a POST to `url` (CHAT or COMPLETIONS) with the fields `more`.

    Raises InvalidRequestError, which names the key of the body.
    """
    return _one("prompt", body_jobs(body, url, defaults, **more))


def _one(field: str, specs: Sequence[JobSpec]) -> JobSpec:
    """Return the job of a row, which has no others. Raises InvalidRequestError."""
    if len(specs) > 1:
        raise invalid(
            field,
            f"has {len(specs):,} {'texts' if field == 'input' else 'prompts'}, and a row is one; give each a "
            "row and a custom_id of its own",
        )
    return specs[0]


def body_jobs(body: Mapping[str, Any], url: str, defaults: JobSpec, **more: Any) -> list[JobSpec]:
    """Parse a body like `body_job`, into one job for each prompt if it has a list of them."""
    given = {name: value for name, value in body.items() if value is not None}
    try:
        fields = _fields(given, url)
        if (prompts := _several(fields)) is None:
            specs = [JobSpec.parse(fields | more, defaults)]
        else:
            specs = _of_prompts(fields | more, prompts, defaults)
        _check_best_of(given.get(_BEST_OF), specs[0].params.n)
        return specs
    except InvalidRequestError as error:
        renamed = error.field == "max_tokens" and _LIMIT in given
        raise error.renamed(_LIMIT) if renamed else error from None


def endpoint_of(spec: JobSpec) -> str:
    """Return which of URLS a job's row or request was for."""
    if spec.params.embed:
        return EMBEDDINGS
    if spec.request is not None:
        return RESPONSES
    return COMPLETIONS if spec.messages is None else CHAT


def _several(fields: JsonObject) -> list[Any] | None:
    """Return the prompts if there is a list of texts or of lists of token ids; None for a single prompt."""
    value = fields.get("prompt")
    return value if isinstance(value, list) and isinstance(value[0], str | list) else None


def _of_prompts(fields: JsonObject, prompts: Sequence[Any], defaults: JobSpec) -> list[JobSpec]:
    """Make a job for each prompt, with the same fields."""
    if len(prompts) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"has {len(prompts):,} prompts, more than {MAX_PROMPTS:,}; send several requests"
        )
    specs: list[JobSpec] = []
    for number, prompt in enumerate(prompts):
        try:
            if not (
                isinstance(prompt, str) or (isinstance(prompt, list) and (not prompt or _is_ids(prompt)))
            ):
                raise invalid("prompt", f"must be a text or a list of token ids, not {json_type(prompt)}")
            made = (
                specs[0].prompted(prompt) if specs else JobSpec.parse(fields | {"prompt": prompt}, defaults)
            )
        except InvalidRequestError as error:
            inside = (error.field or "").removeprefix("prompt")
            of_prompt = error.field is not None and error.field.startswith("prompt")
            raise error.renamed(f"prompt[{number}]{inside}") if of_prompt else error from None
        specs.append(made)
    params = specs[0].params
    size = len(specs) * params.answers * params.max_tokens * ((params.logprobs or 0) + 1)
    if size > MAX_REQUEST_TOKENS:
        raise invalid(
            "prompt",
            f"{len(specs):,} prompts may have more than {MAX_REQUEST_TOKENS:,} tokens and log-probabilities "
            "in all; give fewer in one request, or a smaller max_tokens",
        )
    return specs


def _frame(values: JsonObject) -> tuple[Mapping[str, Any], str]:
    """Return the body and the URL of a row."""
    for name in ("method", "url", "body"):
        if values.get(name) is None:
            raise missing(name, 'a row has custom_id, method "POST", url, body')
    for name in values:
        if name not in _FRAME:
            raise unknown_field(name, _FRAME)
    method, url, body = values["method"], values["url"], values["body"]
    if method != "POST":
        raise invalid("method", f'must be "POST" (got {method!r})')
    if not isinstance(url, str) or url not in URLS:
        raise invalid("url", f"must be one of {', '.join(URLS)} (got {url!r})")
    if not isinstance(body, Mapping):
        raise invalid("body", f"must be an object, not {json_type(body)}")
    return body, url


def _fields(given: JsonObject, url: str) -> JsonObject:
    """Convert a body to fields of a job; errors name the keys of the body."""
    for name, value in given.items():
        if name not in _BODY[url]:
            raise unknown_field(name, _BODY[url])
        if name in NEUTRAL:
            why = f"is not supported: {_NOT_TAKEN[name].why}"
            check_neutral(name, value, NEUTRAL[name], why)
    fields = {name: value for name, value in given.items() if name in _TAKEN | _OF_CHATS} | _vllm_forms(given)
    fields |= _logprobs(given, url)
    if fields.get("prompt_logprobs") is False:  # as some clients say that they want none
        del fields["prompt_logprobs"]
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
    if url == COMPLETIONS and not (isinstance(value, str) or _is_list(value)):
        got = json_type(value)
        inside = f" that begins with {json_type(value[0])}" if isinstance(value, list) else ""
        raise invalid(prompt, f"must be a text, a list of token ids, or a list of these, not {got}{inside}")
    return fields | {prompt: value}


def _logprobs(given: JsonObject, url: str) -> JsonObject:
    """Convert the keys about log-probabilities, and echo, to fields."""
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
        said = f"must be a whole number from 0 to {MAX_LOGPROBS} (got {short(likely)})"
        raise invalid("top_logprobs", said)
    return {"logprobs": likely or 0, "echo": echo}


def _check_best_of(value: Any, wanted: int) -> None:
    """Refuse `best_of` unless all generated answers are wanted, as there is no ranking."""
    if value is None:
        return
    if type(value) is not int or value < wanted:
        raise invalid(
            _BEST_OF, f"must be a whole number of at least n, which is {wanted} (got {short(value)})"
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


def _is_list(value: Any) -> bool:
    """Return True for a list of token ids or of prompts, by its first item."""
    return isinstance(value, list) and bool(value) and (is_id(value[0]) or isinstance(value[0], str | list))


def _vllm_forms(given: JsonObject) -> JsonObject:
    """Convert vLLM's constraint keys to fields."""
    forms: JsonObject = {}
    # Where a constraint is said in the body, by the name of its field here.
    places = {name: name for name in CONSTRAINT_FIELDS if name in given}

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
        elif value is not None and value is not False and name != "disable_fallback":  # no such constraint
            known = ", ".join((*_STRUCTURED, "json_object"))
            raise unknown_field(place, (), f"remove it; known are {known}")
    return forms


def _read_json(name: str, value: Any) -> Any:
    """Parse a schema given as text, which vLLM accepts, too."""
    return parse_value(value) if name.endswith("json") and isinstance(value, str) else value
