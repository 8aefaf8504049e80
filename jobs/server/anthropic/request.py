"""Parsing of POST /v1/messages in Anthropic's format.

An unsupported key that would change the answer is refused by name; one that only concerns Anthropic's
service, such as caching, is ignored. Our own parameters are accepted, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.neutral import check_neutral
from nightmill.jobs.formats.responses.request import checked_effort
from nightmill.jobs.formats.rows import invalid, missing
from nightmill.jobs.formats.shapes import flag_of, items_of, mapping, only, text_of, type_of
from nightmill.jobs.request.fields import PARAMETERS, unknown_field
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.server.anthropic.turns import TurnMessage, read_messages, read_system

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"

_NOT_HERE = {"n", "echo", "score", "logprobs", "prompt_logprobs", "return_token_ids", "stop"}
_TAKEN = PARAMETERS - _NOT_HERE | CONSTRAINT_FIELDS.keys() | {"model"}
_OWN = frozenset(
    {
        "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config",
        "output_format", "chat_template_kwargs",
    }
)  # fmt: skip
IGNORED = frozenset(
    {
        "metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id",
        "betas",
    }
)  # fmt: skip
"""Keys of a body that are accepted and have no effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
    "diagnostics": (),
    "speed": ("standard",),
    "n": (1,),
}
"""Values of unsupported keys, besides null, that have no effect and are accepted."""
_REFUSALS = {
    "context_management": "is not supported: nothing is left out here unasked; give fewer messages",
    "mcp_servers": "is not supported: this server calls no others; give their functions as tools",
}
KEYS = _TAKEN | _OWN | IGNORED | NEUTRAL.keys() | {"stream"}
"""All keys that a body may have."""
_NOT_CALLED = "only functions can be called here: give its name, description and input_schema"
_OF_TOOLS = frozenset({"type", "name", "description", "input_schema", "strict"})
_TOOL_IGNORED = frozenset({"cache_control", "eager_input_streaming", "input_examples"})
THINKING = {"enabled": True, "adaptive": True, "disabled": False}


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A parsed body: the job, and the delivery of its answer."""

    spec: JobSpec
    stream: bool


def read_message(body: Mapping[str, Any], defaults: JobSpec, *, counted: bool = False) -> MessageRequest:
    """Parse a body; raises InvalidRequestError, which names the key.

    `counted`: only its tokens are counted, so max_tokens may be missing.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in KEYS:
            raise unknown_field(name, KEYS)
        if name in NEUTRAL:
            check_neutral(name, value, NEUTRAL[name], _REFUSALS.get(name))
    for name in ("messages",) if counted else ("max_tokens", "messages"):
        if name not in given:
            raise missing(name, f"{MESSAGES} needs it")
    stream = flag_of(given.get("stream"), "stream", False)
    messages = read_system(given.get("system")) + read_messages(given["messages"])
    fields = _fields(given)
    # The answer continues the assistant's message.
    if messages[-1].message["role"] == "assistant" and not messages[-1].calls:
        if fields["tools"] and fields.get("tool_choice") != "none":
            said = "end with what the model has begun, which cannot become a call; end with the user's, or"
            raise invalid("messages", f'{said} give tool_choice {{"type": "none"}}')
        fields["continue_final_message"] = True
    try:
        spec = JobSpec.parse(fields | {"messages": [one.message for one in messages]}, defaults)
    except InvalidRequestError as error:
        raise error.renamed(_place(str(error.field), messages)) from None
    return MessageRequest(spec, stream)


def _fields(given: JsonObject) -> JsonObject:
    """Convert a body to fields of the job."""
    fields = {name: given[name] for name in given.keys() & _TAKEN}
    stops = items_of(given.get("stop_sequences", []), "stop_sequences")
    fields["stop"] = stops or None
    fields |= _tools(given)
    thinking, form = _thinking(given)
    if form and (other := next((name for name in CONSTRAINT_FIELDS if name in given), None)):
        raise invalid("output_config.format", f"contradicts {other}; give one of them")
    return fields | form | thinking


def _tools(given: JsonObject) -> JsonObject:
    tools = [
        _tool(tool, f"tools[{index}]") for index, tool in enumerate(items_of(given.get("tools", []), "tools"))
    ]
    fields: JsonObject = {"tools": tools or None}
    if (choice := given.get("tool_choice")) is None:
        return fields
    choice = mapping(choice, "tool_choice", 'an object, such as {"type": "auto"}')
    only(choice, {"type", "name", "disable_parallel_tool_use"}, "tool_choice")
    kinds = dict.fromkeys(("auto", "any", "tool", "none"))
    kind = type_of(choice, "tool_choice", kinds, "say how tools may be called")
    alone = flag_of(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use", False)
    fields["parallel_tool_calls"] = False if alone else None
    if kind == "tool":
        name = text_of(choice.get("name"), "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        fields["tool_choice"] = "required" if kind == "any" else kind
    return fields


def _tool(tool: Any, place: str) -> JsonObject:
    tool = mapping(tool, place, "an object with a name and an input_schema")
    if tool.get("type") is not None:
        type_of(tool, place, {"custom": None}, _NOT_CALLED)
    check_neutral(f"{place}.defer_loading", tool.get("defer_loading"), (False,))
    check_neutral(f"{place}.allowed_callers", tool.get("allowed_callers"), (["direct"],))
    only(tool, _OF_TOOLS, place, ignored=_TOOL_IGNORED | {"defer_loading", "allowed_callers"})
    if tool.get("input_schema") is None:
        raise missing(f"{place}.input_schema", "give the JSON schema of its arguments")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _thinking(given: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return the fields about reasoning, and the constraint."""
    fields: JsonObject = {}
    variables: JsonObject = {}
    output = mapping(given.get("output_config", {}), "output_config", "an object")
    only(output, {"effort", "format"}, "output_config")
    if output.get("effort") is not None:
        fields["reasoning_effort"] = checked_effort(output["effort"], "output_config.effort")
    if (thinking := given.get("thinking")) is not None:
        thinking = mapping(thinking, "thinking", "an object with a type")
        thinks = THINKING[type_of(thinking, "thinking", THINKING, "give one of these")]
        only(thinking, {"type", "budget_tokens", "display"}, "thinking")
        refusal = "is not supported: thoughts come in full; remove it"
        check_neutral("thinking.display", thinking.get("display"), ("summarized",), refusal)
        fields |= _budget(thinking.get("budget_tokens"), given.get("max_tokens"))
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    said = mapping(given.get("chat_template_kwargs", {}), "chat_template_kwargs", "an object")
    form = given.get("output_format") if output.get("format") is None else output["format"]
    fields["chat_template_kwargs"] = variables | dict(said) or None
    return fields, {} if form is None else {"json_schema": _schema(form)}


def _budget(value: Any, most: Any) -> JsonObject:
    """Return the field for a reasoning budget; one that max_tokens comes before has no effect."""
    if value is None:
        return {}
    if type(value) is not int or value < 0:
        raise invalid("thinking.budget_tokens", "must be a whole number")
    return {"max_reasoning_tokens": value} if type(most) is int and value < most else {}


def _schema(form: Any) -> Any:
    form = mapping(form, "output_config.format", 'an object, {"type": "json_schema", "schema": ...}')
    type_of(form, "output_config.format", {"json_schema": None}, "give a JSON schema")
    only(form, {"type", "schema"}, "output_config.format")
    if form.get("schema") is None:
        raise missing("output_config.format.schema", "give a JSON schema")
    return form["schema"]


_RENAMED = (
    (re.compile(r"stop(?!_)"), "stop_sequences"),
    (re.compile(r"json_schema"), "output_config.format.schema"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"continue_final_message"), "messages"),
)
_OF_MESSAGES = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)")
_OF_BLOCKS = {
    "function.name": "name",
    "function.arguments": "input",
    "id": "id",
    "tool_call_id": "tool_use_id",
}


def _place(field: str, messages: Sequence[TurnMessage]) -> str:
    """Name a field of a job as in the body."""
    if (found := _OF_MESSAGES.fullmatch(field)) is not None:
        placed = messages[int(found[1])]
        rest = found[3].removeprefix(".")
        where = placed.place if found[2] is None else placed.calls[int(found[2])]
        return f"{where}.{_OF_BLOCKS.get(rest, rest)}" if rest else where
    for pattern, theirs in _RENAMED:
        if (found := pattern.match(field)) is not None:
            return found.expand(theirs) + field[found.end() :]
    return field
