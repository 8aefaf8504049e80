"""Calls of tools as grammars: in the model's own way, with arguments by the schemas of their functions.

Where a call must be made there is nothing else. Where functions are strict the model may write what it likes,
until it begins a call. Where an answer without calls must have a form, it is calls or of this form.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from nightmill.jobs.base.contract import CallFormat, Constrained, ConstraintKind, JsonObject, Tools
from nightmill.jobs.request.closing import closed
from nightmill.worker.grammar.thoughts import FINAL, START, pattern_of
from nightmill.worker.grammar.written_calls import WRITTEN, call_rules, literal

MOST_CALLS: Final = 16
"""Most calls in one answer: a weak model could go on to its limit."""


def calls_asked(tools: Tools, written: CallFormat, form: Constrained | None = None) -> Constrained:
    """Build the constraint of an answer that calls tools, for `Request.constrained`.

    `form`: the constraint that the answer may meet in place of calls.
    """
    functions = [
        [tool["function"]["name"], _parameters(tool["function"], tools)]
        for tool in tools.functions
        if tools.function in (None, tool["function"]["name"])
    ]
    several = tools.parallel and tools.function is None and written not in _ALONE
    said = {
        "written": str(written), "free": not tools.required and form is None, "several": several,
        "functions": functions,
    } | ({} if form is None else {"form": form.values()})  # fmt: skip
    return Constrained(ConstraintKind.CALLS, json.dumps(said, ensure_ascii=False, separators=(",", ":")))


def _parameters(function: JsonObject, tools: Tools) -> JsonObject:
    enforced = tools.required or function.get("strict")
    parameters: JsonObject = function.get("parameters", {}) if enforced else {}
    return closed({"type": "object"} | parameters)


def calls_lark(
    text: str, enforced: Callable[[JsonObject], JsonObject], lark_of: Callable[[Constrained], str]
) -> str:
    """The grammar of `calls_asked`'s text. Raises ValueError, TypeError and KeyError for what is none.

    enforced  makes a schema what the parser is to read
    lark_of   the grammar of a form
    """
    said = json.loads(text)
    written, free, functions = CallFormat(said["written"]), said["free"], said["functions"]
    if written is CallFormat.HARMONY:
        return _harmony_lark(said, enforced, lark_of)
    mark = _MARKS.get(written, "") if free else ""  # which the rule `head` has eaten
    before, after = _AROUND_ARGUMENTS.get(written, ("", ""))
    begin, between, end = _AROUND_CALLS[written]
    form, bare = said.get("form"), before.startswith("{")
    rules = []
    for number, (name, parameters) in enumerate(functions):
        if written in WRITTEN:
            own = mark if WRITTEN[written].before.startswith(mark) else ""
            rules += call_rules(number, name, parameters, written, enforced, own)
            continue
        quoted = name if written in _BARE_NAMES else json.dumps(name)
        first, index, second = before.replace("NAME", quoted).removeprefix(mark).partition("INDEX")
        opening = _opening(first, apart=bare and form is not None)
        if index:
            opening += f" /[0-9]{{1,3}}/ {literal(second)}"
        rules += [
            f"call{number}: {opening} arguments{number} {literal(after)}",
            f"arguments{number}: %json {json.dumps(enforced(parameters))}",
        ]
    rules.append("call: " + " | ".join(f"call{number}" for number in range(len(functions))))
    several = f"({literal(between)} call){{0,{MOST_CALLS - 1}}}" if said["several"] else ""
    calls = f"{literal(begin.removeprefix(mark))} call {several} {literal(end)}"
    if written is CallFormat.JSON and several:  # a list only of several
        calls = f'call | "[" call {several} "]"'
    if form is not None:
        inside = lark_of(Constrained(ConstraintKind(form["kind"]), form["text"]))
        calls += " | form"
        rules.append(f"form: %lark {{\n{inside}\n}}")
    if not free:
        return "\n".join([f"start: {calls}", *rules])
    if not mark:
        return "\n".join([f"start: {calls} | TEXT", _TEXT.format(r"\s*[{\[]"), *rules])
    most = MOST_CALLS if said["several"] else 1
    again = "call" if not begin else f"({calls})"  # a list has all of them behind one mark
    head = f"head[suffix={json.dumps(mark)}]: /(?s:.*)/"
    text_rule = _TEXT.format(f"(?s:.*){pattern_of(mark)}")
    return "\n".join([f"start: (head {again}){{0,{most}}} TEXT", head, text_rule, *rules])


def _harmony_lark(
    said: JsonObject, enforced: Callable[[JsonObject], JsonObject], lark_of: Callable[[Constrained], str]
) -> str:
    """The grammar of messages to channels, of which the last is a call, or an answer where there may be one.

    The recipient stands before the channel or behind it. The model may think before, and where calls are
    free say what it does.
    """
    rules, calls = [], []
    for number, (name, parameters) in enumerate(said["functions"]):
        headers = (
            f" to=functions.{name}<|channel|>commentary json<|message|>",
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        )
        either = " | ".join(map(json.dumps, headers))
        rules += [
            f"call{number}: ({either}) arguments{number}",
            f"arguments{number}: %json {json.dumps(enforced(parameters))}",
        ]
        calls.append(f"call{number}")
    last, channels = " | ".join(calls), "analysis"
    if (form := said.get("form")) is not None:
        last += f" | {json.dumps(FINAL)} form"
        inside = lark_of(Constrained(ConstraintKind(form["kind"]), form["text"]))
        rules.append(f"form: %lark {{\n{inside}\n}}")
    elif said["free"]:
        last += f" | {json.dumps(FINAL)} TEXT"
        rules.append("TEXT: /(?s:.*)/")
        channels = "(analysis|commentary)"
    thoughts = f"thoughts[suffix={json.dumps('<|end|>')}]: /<\\|channel\\|>{channels}<\\|message\\|>(?s:.*)/"
    many = "*" if said["free"] else "?"
    return "\n".join([f"start: (thoughts {json.dumps(START)}){many} ({last})", thoughts, *rules])


def _opening(text: str, *, apart: bool) -> str:
    """Write the beginning of a call as Lark's literals.

    `apart`: one literal for each part that JSON has, since a form may begin like a call.

    The lexer takes the longest lexeme that may be there, and does not come back to a shorter one.
    """
    return " ".join(map(json.dumps, _JSON_PARTS.findall(text))) if apart else json.dumps(text)


_JSON_PARTS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|.')
_TEXT: Final = "TEXT: /(?s:.*)/ & ~/{}(?s:.*)/"
_MARKS: Final = {
    CallFormat.HERMES: "<tool_call>",
    CallFormat.QWEN_XML: "<tool_call>",
    CallFormat.GLM_XML: "<tool_call>",
    CallFormat.GEMMA: "<|tool_call>",
    CallFormat.LFM2: "<|tool_call_start|>",
    CallFormat.GRANITE: "<|tool_call|>",
    CallFormat.GIGACHAT: "<|function_call|>",
    CallFormat.PHI: "<|tool_call|>",
    CallFormat.NEMOTRON: "<TOOLCALL>",
    CallFormat.TOOL_CALLS: "<tool_calls>",
    CallFormat.MISTRAL: "[TOOL_CALLS]",
    CallFormat.MISTRAL_NAMED: "[TOOL_CALLS]",
    CallFormat.DEEPSEEK: "<｜tool▁calls▁begin｜>",
    CallFormat.DEEPSEEK_R1: "<｜tool▁calls▁begin｜>",
    CallFormat.KIMI: "<|tool_calls_section_begin|>",
    CallFormat.COHERE: "<|START_ACTION|>",
    CallFormat.SEED: "<seed:tool_call>",
    CallFormat.MINIMAX: "<minimax:tool_call>",
}
"""Marks that begin calls which may stand behind text, by format."""
_AROUND_ARGUMENTS: Final = {
    CallFormat.HERMES: ('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    CallFormat.LLAMA: ('{"name": NAME, "parameters": ', "}"),
    CallFormat.MISTRAL: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.MISTRAL_NAMED: ("[TOOL_CALLS]NAME[ARGS]", ""),
    CallFormat.JSON: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.GRANITE: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.GIGACHAT: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.PHI: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.NEMOTRON: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.TOOL_CALLS: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.DEEPSEEK: ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    CallFormat.DEEPSEEK_R1: (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>",
    ),
    CallFormat.KIMI: (
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    CallFormat.COHERE: ('{"tool_call_id": "INDEX", "tool_name": NAME, "parameters": ', "}"),
}  # fmt: skip
"""Before and behind the arguments, with the function's NAME and the INDEX of the call in their places."""
_BARE_NAMES: Final = frozenset(
    {CallFormat.MISTRAL_NAMED, CallFormat.DEEPSEEK, CallFormat.DEEPSEEK_R1, CallFormat.KIMI}
)
"""Formats in which names are written without quotation marks."""
_ALONE: Final = frozenset({CallFormat.GIGACHAT})
"""Formats that have no place for a second call."""
_AROUND_CALLS: Final = {
    CallFormat.QWEN_XML: ("", "\n", ""),
    CallFormat.GLM_XML: ("", "\n", ""),
    CallFormat.GEMMA: ("", "", ""),
    CallFormat.LFM2: ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    CallFormat.PYTHONIC: ("[", ", ", "]"),
    CallFormat.GRANITE: ("<|tool_call|>[", ", ", "]"),
    CallFormat.GIGACHAT: ("<|function_call|>", "", ""),
    CallFormat.PHI: ("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    CallFormat.NEMOTRON: ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    CallFormat.TOOL_CALLS: ("<tool_calls>[", ", ", "]</tool_calls>"),
    CallFormat.HERMES: ("", "\n", ""),
    CallFormat.LLAMA: ("", "; ", ""),
    CallFormat.MISTRAL: ("[TOOL_CALLS][", ", ", "]"),
    CallFormat.MISTRAL_NAMED: ("", "", ""),
    CallFormat.JSON: ("", ", ", ""),
    CallFormat.DEEPSEEK: ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    CallFormat.DEEPSEEK_R1: ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    CallFormat.KIMI: ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    CallFormat.COHERE: ("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    CallFormat.SEED: ("", "\n", ""),
    CallFormat.MINIMAX: ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
}
"""Before all calls, between two, and after all."""
