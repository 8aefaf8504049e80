"""Parsers of tool calls whose arguments are JSON, with numbers kept as they were written."""

import json
import re
from collections.abc import Iterator
from typing import Any

Found = tuple[str, str]
"""The name of a function and its arguments, a JSON object as text."""

BEGIN_MISTRAL, BEGIN_LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\]|(?=\s*\{))\s*")
_BETWEEN = re.compile(r"[\s;,]*")  # separators between calls
_MARKS = re.compile(r"(?:\s|\[TOOL_CALLS\])*")
_AROUND = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|[\s;,\[\]])*")  # calls, in any style
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")  # the same rule as for messages
_FENCE = "```"
_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([A-Za-z0-9_.:/-]{1,256})\s*```json"
    r"|([A-Za-z0-9_.:/-]{1,256})<｜tool▁sep｜>)\s*"
)
_DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>\s*")
_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([A-Za-z0-9_.:/-]{1,256}?)(?::\d{1,9})?\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>\s*")


def tagged(text: str) -> list[Found]:
    """Parse one call, or a list of calls."""
    return _of(_json(text))


def bare(text: str) -> list[Found]:
    """Parse calls one after another, or a list of calls, possibly in a Markdown fence."""
    if (inside := text.strip()).startswith(_FENCE):
        text = inside.removeprefix(_FENCE).removeprefix("json").removesuffix(_FENCE).strip()
    found: list[Found] = []
    place = _after(_BETWEEN, text, 0)
    while place < len(text):
        value, place = _decoder.raw_decode(text, place)
        found += _of(value)
        place = _after(_BETWEEN, text, place)
    return found


def mistral(text: str) -> list[Found]:
    """Parse lists of calls, and names with arguments; each may begin with the mark again."""
    found: list[Found] = []
    place = _after(_MARKS, text, 0)
    while place < len(text):
        if text[place] in "[{":
            value, place = _decoder.raw_decode(text, place)
            found += _of(value)
        else:
            named = _NAMED.match(text, place)
            if named is None:
                raise ValueError("neither a list nor a name")
            value, place = _decoder.raw_decode(text, named.end())
            found.append((named[1], _arguments(value)))
        place = _after(_MARKS, text, place)
    return found


def llama(text: str) -> list[Found]:
    return bare(text.strip().removeprefix(BEGIN_LLAMA))


def deepseek(text: str) -> Iterator[Found]:
    """Parse calls as DeepSeek writes them: V3.1 as NAME and JSON, R1 with JSON in a Markdown fence."""
    return _between_marks(text, _DEEPSEEK_CALL, _DEEPSEEK_END)


def kimi(text: str) -> Iterator[Found]:
    """Parse calls as Kimi K2 writes them, whose names have a number behind."""
    return _between_marks(text, _KIMI_CALL, _KIMI_END)


def _between_marks(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> Iterator[Found]:
    """Parse calls each of which has marks; of a text that is cut, those that are whole come first."""
    place = 0
    while (call := begin.match(text, place)) is not None:
        value, place = _decoder.raw_decode(text, call.end())
        yield call[call.lastindex or 1], _arguments(value)
        ended = end.match(text, place)
        if ended is None:
            break
        place = ended.end()
    if text[place:].strip():
        raise ValueError("not a call")


def leading(text: str) -> Iterator[Found]:
    """Calls, up to the first that is not whole."""
    place = _after(_AROUND, text, 0)
    while place < len(text):
        named = None if text[place] == "{" else _NAMED.match(text, place)
        try:
            value, place = _decoder.raw_decode(text, place if named is None else named.end())
            found = _of(value) if named is None else [(named[1], _arguments(value))]
        except (ValueError, RecursionError):
            return
        yield from found
        place = _after(_AROUND, text, place)


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Return the end of the match at `place`, or `place` without a match."""
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _of(value: Any) -> list[Found]:
    """Parse a call or a list of calls; raises ValueError for anything else."""
    found: list[Found] = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
        if not isinstance(name, str) or isinstance(name, _Number) or not NAME.fullmatch(name):
            raise ValueError("not a call")
        arguments: Any = next((call[key] for key in ("arguments", "parameters") if key in call), {})
        found.append((name, _arguments(arguments)))
    return found


def arguments_of(text: str) -> str:
    """Return a JSON object as it is stored in a call; raises ValueError for other text."""
    return _arguments(_json(text))


def _arguments(value: Any) -> str:
    """Return arguments as JSON; a model trained on APIs may write them as a JSON string."""
    if isinstance(value, str) and not isinstance(value, _Number):
        value = _json(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    text = _written(value)
    text.encode()  # raises for a lone surrogate, which no file or response can contain
    return text


class _Number(str):
    """A number exactly as written, of any size and precision."""

    __slots__ = ()


def _written(value: Any) -> str:
    """Serialise a value of `_decoder` as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return str(value) if isinstance(value, _Number) else json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_float=_Number, parse_int=_Number, parse_constant=_no_constant)


def _json(text: str) -> Any:
    return _decoder.decode(text.strip())
