"""Find out how a model's template deals with tools, by what it makes of a call.

Templates say nowhere how their model writes a call. But they write the calls of earlier messages in the same
way: so a chat with one is rendered, and the call looked for in the text. That also shows whether the template
tells the model of tools at all, and whether it takes arguments as objects or as texts of JSON.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nightmill.jobs.base.contract import CallFormat, Tools
from nightmill.jobs.errors import ChatTemplateError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Mapping[str, Any]], str | ChatTemplateError]
"""A chat's variables to its text."""

_NAME, _KEY, _VALUE, _RESULT = "night_function", "night_key", "night_value", "night_result"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}
_ID: Final = "abcdefghi"  # Mistral's templates want nine letters and digits
_ARGUMENTS: Final = {_KEY: _VALUE}
_PLAIN = re.compile(rf'\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}')
_CALL = rf'\{{\s*"name":\s*"{_NAME}",\s*"(arguments|parameters)":\s*\{{[^{{}}]*\}}'
_SHAPES: Final[tuple[tuple[CallFormat, re.Pattern[str]], ...]] = (
    (CallFormat.HERMES, re.compile(rf"<tool_call>\s*{_CALL}\s*\}}\s*</tool_call>")),
    (CallFormat.MISTRAL, re.compile(rf"\[TOOL_CALLS\]\s*\[\s*{_CALL}")),
    (CallFormat.MISTRAL_NAMED, re.compile(rf"\[TOOL_CALLS\]\s*{_NAME}(\[CALL_ID\]{_ID})?(\[ARGS\])?\s*\{{")),
    (
        CallFormat.HARMONY,
        re.compile(rf"to=functions\.{_NAME}<\|channel\|>commentary json<\|message\|>\s*\{{"),
    ),
    (CallFormat.PHI, re.compile(rf"<\|tool_call\|>\s*\[?\s*{_CALL}\s*\}}\s*\]?\s*<\|/tool_call\|>")),
    (CallFormat.GRANITE, re.compile(rf"<\|tool_call\|>\s*\[?\s*{_CALL}")),
    (CallFormat.GIGACHAT, re.compile(rf"<\|function_call\|>\s*{_CALL}")),
    (CallFormat.NEMOTRON, re.compile(rf"<TOOLCALL>\s*\[?\s*{_CALL}")),
    (CallFormat.TOOL_CALLS, re.compile(rf"<tool_calls>\s*\[?\s*{_CALL}")),
    (CallFormat.DEEPSEEK, re.compile(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>\s*\{{")),
    (
        CallFormat.DEEPSEEK_R1,
        re.compile(rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*```json\s*\{{"),
    ),
    (
        CallFormat.KIMI,
        re.compile(
            rf"<\|tool_call_begin\|>\s*(?:{_ID}|functions\.{_NAME}:0)\s*<\|tool_call_argument_begin\|>\s*\{{"
        ),
    ),
    (
        CallFormat.COHERE,
        re.compile(
            rf'<\|START_ACTION\|>\s*\[\s*\{{"tool_call_id": "0", "tool_name": "{_NAME}", "parameters": \{{'
        ),
    ),
)
_SHAPES_OF_ARGUMENTS: Final[tuple[tuple[CallFormat, re.Pattern[str]], ...]] = (
    (
        CallFormat.QWEN_XML,
        re.compile(rf"<tool_call>\s*<function={_NAME}>\s*<parameter={_KEY}>\s*{_VALUE}\s*</parameter>"),
    ),
    (
        CallFormat.GLM_XML,
        re.compile(
            rf"<tool_call>{_NAME}\s*<arg_key>{_KEY}</arg_key>\s*<arg_value>{_VALUE}</arg_value>\s*</tool_call>"
        ),
    ),
    (
        CallFormat.GEMMA,
        re.compile(rf'<\|tool_call>call:{_NAME}\{{{_KEY}:<\|"\|>{_VALUE}<\|"\|>\}}<tool_call\|>'),
    ),
    (
        CallFormat.LFM2,
        re.compile(rf"<\|tool_call_start\|>\[{_NAME}\({_KEY}=['\"]{_VALUE}['\"]\)\]<\|tool_call_end\|>"),
    ),
    (
        CallFormat.SEED,
        re.compile(
            rf"<seed:tool_call>\s*<function={_NAME}>\s*<parameter={_KEY}>{_VALUE}</parameter>\s*</function>"
        ),
    ),
    (
        CallFormat.MINIMAX,
        re.compile(
            rf'<minimax:tool_call>\s*<invoke name="{_NAME}">\s*<parameter name="{_KEY}">{_VALUE}</parameter>'
        ),
    ),
    (CallFormat.PYTHONIC, re.compile(rf"(?<!>)\[{_NAME}\({_KEY}=['\"]{_VALUE}['\"]\)\]")),
)
"""Patterns of calls whose arguments are not JSON, in the order in which they are tried."""
_SIGNS: Final = (
    ("<|tool_call|>", CallFormat.GRANITE),
    ("<|tool_list_start|>", CallFormat.LFM2),
    ("\nList of tools: [", CallFormat.LFM2),  # LFM2.5
)
"""Signs in templates that show no calls of earlier messages, with the format that each tells of."""
_BARE = re.compile(rf"\s*(?:<\|python_tag\|>)?{_CALL}\s*\}}")
REMEDY: Final = (
    "serve the model with --tool-format json, by which a system message describes tools, or remove them"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The form in which tools are described to a model, and in which it calls them.

    calls          how it writes calls
    as_text        the template takes the arguments of calls as JSON texts, and not as objects
    in_words       the template does not know tools: they are described in a system message
    in_system      the template wants tools as a text of JSON in the system message (Phi-4 mini)
    in_content     the template shows no calls of earlier messages: they are written into their texts
    described      the template shows calls, but says nothing of tools: a system message does (DeepSeek)
    no_content     the template shows calls only of messages without a text (DeepSeek R1), which so lose it
    numbered       calls have their name and number as ids (Kimi): by "chat", or by "message", or not
    """

    calls: CallFormat
    as_text: bool = False
    in_words: bool = False
    in_content: bool = False
    in_system: bool = False
    described: bool = False
    no_content: bool = False
    numbered: Literal["chat", "message"] | None = None

    def told(
        self, messages: Messages, tools: Tools | None
    ) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]] | None]:
        """The messages and tools that the template is given."""
        if self.in_words:
            return _in_words(messages, tools), None
        if self.in_system and tools is not None:
            messages = _in_system(messages, tools.functions)
        if self.described and tools is not None:
            messages = _with_system(messages, _description(self.calls, tools))
        if self.numbered:
            messages = _numbered(messages, self.numbered)
        if self.no_content:
            messages = [
                {**message, "content": None} if message.get("tool_calls") else message for message in messages
            ]
        if self.in_content:
            messages = [_with_calls_in_text(message, self.calls) for message in messages]
        told = list(messages) if self.as_text else [_with_objects(message) for message in messages]
        return told, None if tools is None or self.described else list(tools.functions)


def tool_use(render: Render, wanted: CallFormat | None) -> ToolUse:
    """Find out by rendering how a template describes and calls tools.

    `wanted` is how the model is said to write calls, whatever its template shows.

    Raises ChatTemplateError if the template knows no tools, or nobody knows how its calls are written.
    """
    if wanted is CallFormat.JSON:
        return ToolUse(CallFormat.JSON, in_words=True)
    told = render({"messages": [_user()], "tools": [_TOOL], "add_generation_prompt": True})
    if isinstance(told, ChatTemplateError) or _NAME not in told:
        in_system = _in_system([_user()], [_TOOL])
        told = render({"messages": in_system, "tools": None, "add_generation_prompt": True})
        if not isinstance(told, ChatTemplateError) and _NAME in told:
            return ToolUse(wanted or CallFormat.PHI, in_content=True, in_system=True)
        shown = _use_without_tools(render, wanted)
        if shown is None:
            raise ChatTemplateError(f"tools: the model's chat template does not know them; {REMEDY}")
        return shown
    for as_text in (False, True):
        text = render({"messages": _chat(as_text), "tools": [_TOOL], "add_generation_prompt": True})
        if isinstance(text, ChatTemplateError):
            continue
        of_arguments = next((one for one, shape in _SHAPES_OF_ARGUMENTS if shape.search(text)), None)
        if of_arguments is not None and wanted in (None, of_arguments):
            return ToolUse(of_arguments, as_text)
        if not _PLAIN.search(text):
            continue
        found = wanted or _format_of(text, told)
        if found is CallFormat.KIMI:
            by_message = f"functions.{_NAME}:0" in text
            return ToolUse(found, as_text, numbered="message" if by_message else "chat")
        if found is not None:
            return ToolUse(found, as_text)
    by_sign = next((one for sign, one in _SIGNS if sign in told), None)
    if wanted is not None or by_sign is not None:
        return ToolUse(wanted or by_sign or CallFormat.JSON, in_content=by_sign is not None)
    raise ChatTemplateError(
        f"tools: how calls are written by the model's chat template is not known here; {REMEDY}"
    )


def _use_without_tools(render: Render, wanted: CallFormat | None) -> ToolUse | None:
    """Return how calls are written by a template that says nothing of tools; None if it shows no calls."""
    for no_content in (False, True):
        for as_text in (False, True):
            messages = _chat(as_text)
            if no_content:
                messages[1]["content"] = None
            text = render({"messages": messages, "tools": None, "add_generation_prompt": True})
            found = None if isinstance(text, ChatTemplateError) else _format_of(text, "")
            if found in _EXAMPLES:
                return ToolUse(wanted or found, as_text, described=True, no_content=no_content)
    return None


def _format_of(text: str, prompt: str) -> CallFormat | None:
    """Return how the call is written in this text, where an answer to `prompt` makes it; None if unknown."""
    for style, shape in _SHAPES:
        if shape.search(text):
            return style
    bare = _BARE.match(text.removeprefix(prompt)) if text.startswith(prompt) else None
    if bare is None:
        return None
    return CallFormat.LLAMA if bare[1] == "parameters" else CallFormat.JSON


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "Hello"}


def _chat(as_text: bool) -> list[dict[str, Any]]:
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        _user(),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT},
    ]


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):  # a row that no client of ours has written
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _in_system(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with functions as a text of JSON in the first, which is the system's."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": functions}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": functions}, *messages]


def _with_calls_in_text(message: Mapping[str, Any], written: CallFormat) -> Mapping[str, Any]:
    """A message with its calls behind its text, as the model writes them, but for control tokens."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [one for call in calls if isinstance(one := _with_object(call).get("function"), Mapping)]
    if written is CallFormat.LFM2:
        said = f"<|tool_call_start|>[{', '.join(map(_python, functions))}]<|tool_call_end|>"
    else:
        end = "<|/tool_call|>" if written is CallFormat.PHI else ""
        said = f"<|tool_call|>{json.dumps(functions, ensure_ascii=False)}{end}"
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{message.get('content') or ''}{said}"}


def _python(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    named = arguments.items() if isinstance(arguments, Mapping) else ()
    return f"{function.get('name')}({', '.join(f'{name}={value!r}' for name, value in named)})"


def _numbered(messages: Messages, by: Literal["chat", "message"]) -> list[Mapping[str, Any]]:
    """The messages with ids such as functions.NAME:0 for calls and their results."""
    ids: dict[Any, str] = {}
    count, told = 0, []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            named = []
            for place, call in enumerate(calls):
                function = call.get("function") if isinstance(call, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                number = count + place if by == "chat" else place
                if isinstance(name, str) and isinstance(call.get("id"), str):
                    ids[call["id"]] = f"functions.{name}:{number}"
                    call = {**call, "id": ids[call["id"]]}
                named.append(call)
            count += len(calls)
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool" and message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        told.append(message)
    return told


_DESCRIBED: Final = """## Tools
You have access to the following tools:
{functions}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
{example}

tool_call_name must be one of these tools, and tool_call_arguments must be JSON that follows its parameters.
{several}"""
"""The system message on tools that DeepSeek's model cards give."""
_EXAMPLES: Final = {
    CallFormat.DEEPSEEK: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    CallFormat.DEEPSEEK_R1: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tool_call_name\n```json\n"
        "tool_call_arguments\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
"""Examples of calls, in formats whose templates may say nothing of tools."""


def _description(written: CallFormat, tools: Tools) -> str:
    functions = "".join(
        f"\n### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}\n"
        for function in (tool["function"] for tool in tools.functions)
    )
    several = (
        "Chain several calls without anything between them." if tools.parallel else "Make one call at most."
    )
    return _DESCRIBED.format(functions=functions.rstrip("\n"), example=_EXAMPLES[written], several=several)


# -- in words ------------------------------------------------------------------------------------

_INSTRUCTION: Final = (
    "You may call these functions, described as JSON:\n{functions}\n"
    'To call one, answer with nothing but {{"name": NAME, "arguments": OBJECT}}{several}. '
    "Else answer as usual."
)
_SEVERAL: Final = ", and to call several, with a list of such objects"


def _in_words(messages: Messages, tools: Tools | None) -> list[Mapping[str, Any]]:
    """The messages as a template without tools takes them: nothing but roles and texts."""
    told: list[Mapping[str, Any]] = [_plain(message) for message in messages]
    if tools is None:
        return told
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools.functions)
    said = _INSTRUCTION.format(functions=functions, several=_SEVERAL if tools.parallel else "")
    return _with_system(told, said)


def _with_system(messages: Messages, said: str) -> list[Mapping[str, Any]]:
    """The messages with a text at the end of the first, which is the system's."""
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{messages[0].get('content')}\n\n{said}"}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result of {message.get('name') or 'the call'}:\n{content}"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return {name: value for name, value in message.items() if name in ("role", "content")}
    functions = [_with_object(call).get("function") for call in calls if isinstance(call, Mapping)]
    written = json.dumps(functions if len(functions) != 1 else functions[0], ensure_ascii=False)
    return {"role": "assistant", "content": f"{content}\n{written}" if content else written}
