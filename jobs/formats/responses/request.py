"""Parsing of POST /v1/responses in OpenAI's format.

An unsupported key that would change the answer is refused by name; one that only concerns OpenAI's service is
ignored. Our own parameters are accepted, too, as in bodies of chats.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.neutral import check_neutral, short
from nightmill.jobs.formats.pairs import read_metadata
from nightmill.jobs.formats.responses.items import ItemMessage, place_in_items, read_input
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.formats.shapes import flag_of, items_of, mapping, only, text_of, type_of, unsupported
from nightmill.jobs.request.effort import effort_fault
from nightmill.jobs.request.fields import PARAMETERS, unknown_field
from nightmill.jobs.request.parameters import MAX_LOGPROBS
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS

RESPONSES = "/v1/responses"

_NOT_HERE = {"max_tokens", "n", "echo", "score", "logprobs", "prompt_logprobs", "return_token_ids"}
_TAKEN = PARAMETERS - _NOT_HERE | CONSTRAINT_FIELDS.keys() | {"model"}
_OWN = frozenset(
    {
        "input", "instructions", "max_output_tokens", "previous_response_id", "tools", "tool_choice",
        "parallel_tool_calls", "text", "reasoning", "include", "top_logprobs", "metadata", "store",
        "background", "chat_template_kwargs",
    }
)  # fmt: skip
IGNORED = frozenset(
    {
        "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "max_tool_calls",
    }
)  # fmt: skip
"""Keys of a body that are accepted and have no effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": ({},),
    "truncation": ("disabled",),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "image": (),
    "background_options": (),
    "n": (1,),
}
"""Values of unsupported keys, besides null, that have no effect and are accepted."""
_REFUSALS = {
    "stream": "is not supported; results are written as they finish",
    "truncation": "is not supported: nothing is left out here unasked; give fewer items",
    "conversation": "is not supported; go on with previous_response_id",
    "prompt": "is not supported: prompts are not stored here; give input and instructions",
    "n": "is not supported: a response is one answer; ask as often, or give n to /v1/chat/completions",
}
KEYS = _TAKEN | _OWN | IGNORED | NEUTRAL.keys()
"""All keys that a body may have."""
_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Allowed values of `include`; reasoning is always included, and never encrypted."""
_NOT_CALLED = "only functions can be called here: describe it as one, and run it yourself"
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed body.

    spec      the job; when continuing a conversation, with the new messages only
    previous  id of the response to continue
    """

    spec: JobSpec
    previous: str | None
    background: bool


def read_response(
    body: Mapping[str, Any], defaults: JobSpec, *, custom_id: str | None = None
) -> ResponseRequest:
    """Parse a body; raises InvalidRequestError, which names the key.

    `custom_id` is given for a row of a file, which cannot continue a response or be stored as one.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in KEYS:
            raise unknown_field(name, KEYS)
        if name in NEUTRAL:
            check_neutral(name, value, NEUTRAL[name], _REFUSALS.get(name))
    background, store = _kept(given, of_file=custom_id is not None)
    previous = given.get("previous_response_id")
    messages = _messages(given)
    fields, request = _fields(given)
    request |= {"store": store, "background": background, "previous_response_id": previous}
    more = {} if custom_id is None else {"custom_id": custom_id}
    try:
        spec = JobSpec.parse(fields | more | {"messages": [one.message for one in messages]}, defaults)
    except InvalidRequestError as error:
        raise error.renamed(_place(str(error.field), messages)) from None
    return ResponseRequest(replace(spec, request=request), previous, background)


def _kept(given: JsonObject, *, of_file: bool) -> tuple[bool, bool]:
    """Return (run in the background, store as a response)."""
    background = flag_of(given.get("background"), "background", False)
    store = flag_of(given.get("store"), "store", True)
    previous = given.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise invalid("previous_response_id", f"must be the id of a response (got {short(previous)})")
    if of_file:
        if background:
            raise unsupported("background", "is for requests; rows of a file wait in any case; remove it")
        if previous is not None:
            said = "is for requests; give the whole conversation as items of input"
            raise unsupported("previous_response_id", said)
        return False, False
    if background and not store:
        raise invalid("background", "contradicts store: false, which leaves nothing to come back for")
    return background, store


def _messages(given: JsonObject) -> list[ItemMessage]:
    """Return all messages of the body: the instructions, if any, and the input."""
    if "input" not in given:
        raise missing("input", "give a text or a list of items")
    messages = read_input(given["input"])
    if "instructions" in given:
        said = text_of(given["instructions"], "instructions")
        messages.insert(0, ItemMessage({"role": "system", "content": said}, "instructions"))
    return messages


def _fields(given: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return the fields of the job, and the part of them that the answer repeats."""
    fields = {name: given[name] for name in given.keys() & _TAKEN}
    tooling, tools = _tools(given)
    said_of_text, form = _text(given.get("text"))
    effort = _reasoning(given)
    likely = _logprobs(given)
    if form and (other := next((name for name in CONSTRAINT_FIELDS if name in given), None)):
        raise invalid("text.format", f"contradicts {other}; give one of them")
    fields |= tooling | form | {"logprobs": likely, "reasoning_effort": effort}
    fields |= {"max_tokens": given.get("max_output_tokens"), "metadata": read_metadata(given.get("metadata"))}
    return fields, {
        "url": RESPONSES,
        "instructions": "instructions" in given,
        "max_output_tokens": given.get("max_output_tokens"),
        "text": said_of_text,
        "reasoning": {"effort": effort, "summary": None},
        "top_logprobs": likely or 0,
    } | tools


class _Tooling(NamedTuple):
    """The tools in the shape of chats, and the part that the answer repeats."""

    fields: JsonObject
    request: JsonObject


def _tools(given: JsonObject) -> _Tooling:
    tools = [
        _tool(tool, f"tools[{index}]") for index, tool in enumerate(items_of(given.get("tools", []), "tools"))
    ]
    choice = given.get("tool_choice", "auto")
    parallel = given.get("parallel_tool_calls")
    fields = {"tools": tools or None, "tool_choice": _choice(choice), "parallel_tool_calls": parallel}
    if not tools and choice == "auto":
        fields["tool_choice"] = None
    shown = [{"type": "function"} | tool["function"] for tool in tools]
    return _Tooling(
        fields,
        {"tools": shown, "tool_choice": choice, "parallel_tool_calls": parallel is not False},
    )


def _tool(tool: Any, place: str) -> JsonObject:
    tool = mapping(tool, place, 'a function, {"type": "function", "name": ...}')
    type_of(tool, place, {"function": None}, _NOT_CALLED)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> str | JsonObject:
    """Convert a tool choice to the shape of chats."""
    if isinstance(choice, Mapping):
        type_of(choice, "tool_choice", {"function": None}, "give the tools that may be called, and no others")
        return {"type": "function", "function": {"name": text_of(choice.get("name"), "tool_choice.name")}}
    if choice not in _CHOICES:
        shape = '{"type": "function", "name": ...}'
        said = f"must be one of {', '.join(_CHOICES)}, or {shape} (got {short(choice)})"
        raise invalid("tool_choice", said)
    return str(choice)


def _text(value: Any) -> tuple[JsonObject, JsonObject]:
    """Return the part of `text` that the answer repeats, and its constraint as fields."""
    value = mapping({} if value is None else value, "text", "an object with a format")
    only(value, {"format", "verbosity"}, "text")
    check_neutral("text.verbosity", value.get("verbosity"), ("medium",))
    plain: JsonObject = {"type": "text"}
    format = mapping(value.get("format") or plain, "text.format", "an object with a type")
    kinds = dict.fromkeys(("text", "json_object", "json_schema"))
    kind = type_of(format, "text.format", kinds, "give a JSON schema")
    allowed = {"type", "name", "description", "schema", "strict"} if kind == "json_schema" else {"type"}
    only(format, allowed, "text.format")
    said = {name: one for name, one in format.items() if one is not None}
    if kind == "text":
        return {"format": plain}, {}
    form: JsonObject = {"type": kind}
    if kind == "json_schema":
        form["json_schema"] = {name: one for name, one in said.items() if name != "type"}
    return {"format": said}, {"response_format": form}


def _reasoning(given: JsonObject) -> str | None:
    """Return the effort."""
    value = mapping(given.get("reasoning", {}), "reasoning", "an object with an effort")
    only(value, {"effort", "summary", "generate_summary"}, "reasoning")
    for name in ("summary", "generate_summary"):
        refusal = "is not supported: thoughts come in full, and not summed up; give auto"
        check_neutral(f"reasoning.{name}", value.get(name), ("auto",), refusal)
    effort = value.get("effort")
    return None if effort is None else checked_effort(effort, "reasoning.effort")


def checked_effort(effort: Any, place: str) -> str:
    """Return a reasoning effort; raises the error of a body that has none."""
    if fault := effort_fault(effort):
        raise invalid(place, fault)
    return str(effort)


def _logprobs(given: JsonObject) -> int | None:
    """Return the number of likeliest tokens; None: no log-probabilities."""
    wanted = items_of(given.get("include", []), "include")
    for name in wanted:
        if name not in INCLUDED:
            said = f"{short(name)} is not supported; remove it; known are {', '.join(INCLUDED)}"
            raise unsupported("include", said)
    likely = given.get("top_logprobs")
    if likely is not None and (type(likely) is not int or not 0 <= likely <= MAX_LOGPROBS):
        said = f"must be a whole number from 0 to {MAX_LOGPROBS} (got {short(likely)})"
        raise invalid("top_logprobs", said)
    return likely or 0 if likely or _LOGPROBS in wanted else None


_RENAMED = (
    (re.compile(r"max_tokens"), "max_output_tokens"),
    (re.compile(r"response_format(?:\.json_schema)?"), "text.format"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"logprobs"), "top_logprobs"),
)


def _place(field: str, messages: list[ItemMessage]) -> str:
    """Name a field of a job as in the body."""
    if field.startswith("messages["):
        return place_in_items(field, messages)
    for pattern, theirs in _RENAMED:
        if (found := pattern.match(field)) is not None:
            return found.expand(theirs) + field[found.end() :]
    return field
