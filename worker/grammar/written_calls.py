"""Grammars of tool calls that are not JSON as a whole: each argument has its own place and marks.

Arguments come in the order of the schema, those that are not required may lack, and no others are added. Of
texts that stand bare between two marks, choices are enforced; other keywords (lengths, patterns, formats)
are not, as for a model that has no grammar.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nightmill.jobs.base.contract import CallFormat, JsonObject
from nightmill.jobs.reply.call_syntax import wants_text

Enforced = Callable[[JsonObject], JsonObject]
"""Makes a schema what the parser of grammars is to read."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks around a call and its arguments, with NAME and KEY in their places.

    text    around a text that stands bare; ("", "") if texts are written as JSON
    behind  what ends an argument
    between arguments; "" if each has its end
    """

    before: str
    after: str
    key: str
    behind: str = ""
    between: str = ""
    text: tuple[str, str] | None = None


WRITTEN: Final = {
    CallFormat.QWEN_XML: _Marks(
        "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "<parameter=KEY>\n",
        "\n</parameter>\n", text=("", "\n</parameter>\n"),
    ),
    CallFormat.GLM_XML: _Marks(
        "<tool_call>NAME\n", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n",
        text=("", "</arg_value>\n"),
    ),
    CallFormat.GEMMA: _Marks(
        "<|tool_call>call:NAME{", "}<tool_call|>", "KEY:", between=",", text=('<|"|>', '<|"|>')
    ),
    CallFormat.LFM2: _Marks("NAME(", ")", "KEY=", between=", "),
    CallFormat.PYTHONIC: _Marks("NAME(", ")", "KEY=", between=", "),
    CallFormat.SEED: _Marks(
        "<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>", "<parameter=KEY>",
        "</parameter>\n", text=("", "</parameter>\n"),
    ),
    CallFormat.MINIMAX: _Marks(
        '<invoke name="NAME">\n', "</invoke>", '<parameter name="KEY">', "</parameter>\n",
        text=("", "</parameter>\n"),
    ),
}  # fmt: skip
"""The marks of these formats, as the templates of their models write them."""


def call_rules(
    number: int, name: str, parameters: JsonObject, written: CallFormat, enforced: Enforced, mark: str
) -> list[str]:
    """The rules of one call, `callN`, and of its arguments; `mark`, with which it begins, is left out."""
    marks = WRITTEN[written]
    opening = marks.before.replace("NAME", name).removeprefix(mark)
    rules, arguments = _arguments(f"a{number}_", parameters, marks, enforced)
    call = f"call{number}: {literal(opening)} {arguments} {literal(marks.after)}"
    return [call, *rules]


def _arguments(
    prefix: str, parameters: JsonObject, marks: _Marks, enforced: Enforced
) -> tuple[list[str], str]:
    """Return the rules of all arguments, and what stands for them in a call."""
    properties = parameters.get("properties")
    required = parameters.get("required")
    needed = set(required) if isinstance(required, list) else set()
    rules = []
    places = list(properties.items()) if isinstance(properties, Mapping) else []
    for place, (key, schema) in enumerate(places):
        rules += _argument(f"{prefix}{place}", key, schema, parameters, marks, enforced)
    if not places:
        return rules, ""
    if not marks.between:
        each = (f"{prefix}{place}" + "?" * (key not in needed) for place, (key, _) in enumerate(places))
        return rules, " ".join(each)
    return rules + _separated(prefix, [key in needed for key, _ in places], marks.between), f"{prefix}first0"


def _separated(prefix: str, needed: list[bool], between: str) -> list[str]:
    """Rules of arguments with something between two: `first` has none before it, `more` has some."""
    count = len(needed)
    rules = [f'{prefix}more{count}: ""', f'{prefix}first{count}: ""']
    for place, must in enumerate(needed):
        one, rest = f"{prefix}{place}", f"{prefix}more{place + 1}"
        with_it = f"{literal(between)} {one} {rest}"
        rules.append(f"{prefix}more{place}: {with_it}" + ("" if must else f" | {rest}"))
        rules.append(f"{prefix}first{place}: {one} {rest}" + ("" if must else f" | {prefix}first{place + 1}"))
    return rules


def _argument(
    rule: str, key: str, schema: Any, parameters: JsonObject, marks: _Marks, enforced: Enforced
) -> list[str]:
    before = literal(marks.key.replace("KEY", key))
    if marks.text is None or not wants_text(schema):
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        for name in ("$defs", "definitions"):
            if name in parameters:
                whole[name] = parameters[name]
        return [
            f"{rule}: {before} {rule}v {literal(marks.behind)}",
            f"{rule}v: %json {_json(enforced(whole))}",
        ]
    enforced({**schema})  # its faults are faults, too
    begin, end = marks.text
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        texts = " | ".join(literal(text) for text in choices)
        return [f"{rule}: {before} {literal(begin)} {rule}v {literal(end)}", f"{rule}v: {texts}"]
    return [f"{rule}: {before} {literal(begin)} {rule}v", f"{rule}v[suffix={_json(end)}]: /(?s:.*)/"]


def literal(text: str) -> str:
    """A text as Lark's literal; nothing for no text."""
    return _json(text) if text else ""


def _json(value: Any) -> str:
    return json.dumps(value)
