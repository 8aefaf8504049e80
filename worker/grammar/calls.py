"""Calls of tools that must be made, as grammars: in the model's own way, with arguments by their schemas."""

import json
from typing import Any, Final

from nightmill.jobs.contract import CallFormat, Constrained, ConstraintKind, Tools

MOST_CALLS: Final = 16
"""Of one answer: a weak model could go on to its limit."""


def calls_asked(tools: Tools, written: CallFormat) -> Constrained:
    """That an answer must be calls, for `Request.constrained`."""
    functions = [
        [tool["function"]["name"], tool["function"].get("parameters", {})]
        for tool in tools.functions
        if tools.function in (None, tool["function"]["name"])
    ]
    several = tools.parallel and tools.function is None
    said = {"written": str(written), "several": several, "functions": functions}
    return Constrained(ConstraintKind.CALLS, json.dumps(said, ensure_ascii=False, separators=(",", ":")))


def calls_lark(text: str, schema_options: dict[str, Any]) -> str:
    """The grammar of `calls_asked`'s text. Raises ValueError, TypeError and KeyError for what is none."""
    said = json.loads(text)
    written = CallFormat(said["written"])
    rules = []
    for number, (name, parameters) in enumerate(said["functions"]):
        schema = {"type": "object"} | parameters | {"x-guidance": schema_options}
        before, after = _AROUND_ARGUMENTS[written]
        quoted = json.dumps(name) if written is not CallFormat.MISTRAL_NAMED else name
        rules += [
            f"call{number}: {json.dumps(before.replace('NAME', quoted))} arguments{number}"
            + (f" {json.dumps(after)}" if after else ""),
            f"arguments{number}: %json {json.dumps(schema)}",
        ]
    rules.append("call: " + " | ".join(f"call{number}" for number in range(len(said["functions"]))))
    begin, between, end = _AROUND_CALLS[written]
    further = (
        f" ({json.dumps(between) if between else ''} call){{0,{MOST_CALLS - 1}}}" if said["several"] else ""
    )
    start = f"{json.dumps(begin)} call{further} {json.dumps(end)}" if begin else f"call{further}"
    if written is CallFormat.JSON and further:  # a list only of several
        start = f'call | "[" call{further} "]"'
    return "\n".join([f"start: {start}", *rules])


_AROUND_ARGUMENTS: Final = {
    CallFormat.HERMES: ('<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    CallFormat.LLAMA: ('{"name": NAME, "parameters": ', "}"),
    CallFormat.MISTRAL: ('{"name": NAME, "arguments": ', "}"),
    CallFormat.MISTRAL_NAMED: ("[TOOL_CALLS]NAME[ARGS]", ""),
    CallFormat.JSON: ('{"name": NAME, "arguments": ', "}"),
}
_AROUND_CALLS: Final = {
    CallFormat.HERMES: ("", "\n", ""),
    CallFormat.LLAMA: ("", "; ", ""),
    CallFormat.MISTRAL: ("[TOOL_CALLS][", ", ", "]"),
    CallFormat.MISTRAL_NAMED: ("", "", ""),
    CallFormat.JSON: ("", ", ", ""),
}
"""Before all calls, between two, and after all."""
