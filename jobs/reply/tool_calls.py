"""Parsing of tool calls in a text, in each syntax that models use.

Text that turns out not to be a call, since it cannot be parsed or names no function, stays text.
"""

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import CallFormat, JsonObject, Tools
from nightmill.jobs.reply.call_syntax import (
    Parsed,
    Types,
    gemma_call,
    glm_call,
    python_calls,
    tagged_calls,
)
from nightmill.jobs.reply.reasoning import undecided_from

_MOST_ENDS = 8  # end marks outside strings that are tried before the text is given up as a call
_BEGIN_MISTRAL, _BEGIN_LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\]|(?=\s*\{))\s*")
_BETWEEN = re.compile(r"[\s;,]*")  # separators between calls
_MARKS = re.compile(r"(?:\s|\[TOOL_CALLS\])*")
_AROUND = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|[\s;,\[\]])*")  # calls, in any style
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")  # the same rule as for messages
# The rest of a JSON string, up to its closing quotation mark.
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FENCE = "```"

Found = tuple[str, str]
"""The name of a function and its arguments, a JSON object as text."""


class _Style(NamedTuple):
    """A syntax of tool calls in a text.

    begin, end  marks around calls; without an end mark, calls extend to the end of the text
    bare        beginnings of a text that consists of calls alone
    parse       parses the text between the marks; empty if it is not calls
    known       only names of existing functions count, as the text could be any JSON
    typed       parses texts whose values have the types that their function's schema says
    """

    parse: Callable[[str], list[Found]]
    begin: str = ""
    end: str = ""
    bare: tuple[str, ...] = ()
    known: bool = False
    typed: Callable[[str, Types], list[Parsed]] | None = None


class Calls:
    """An incremental parser that separates tool calls from text; white space between the two is dropped."""

    def __init__(self, written: CallFormat, tools: Tools) -> None:
        """Parse the syntax `written`, one of KNOWN."""
        self._style = _STYLES[written]
        self._names = tools.names
        self._tools = tools
        self._most = None if tools.parallel else 1  # calls that are still accepted
        self._must = tools.required  # unreadable text is a call that was cut
        self._pending = ""
        self._blank = ""  # white space that is emitted only if text follows
        self._begins = bool(self._style.bare)  # only white space so far
        self._inside = self._marked = self._had = self._quoted = False
        end = re.escape(self._style.end)
        self._edge = re.compile(f'"|{end}' if self._style.typed is None else end)
        self._looked = 0  # how far the text was searched for an end mark
        self._ends = 0

    def push(self, text: str) -> Iterator[str | Found]:
        """Add a piece of the text; yields the text and calls that are known now."""
        self._pending += text
        while self._pending:
            if self._begins and not self._begun():
                return
            if self._inside:
                if not (yield from self._closed()):
                    return
            elif not (yield from self._opened()):
                return

    def end(self) -> Iterator[str | Found]:
        """Yield the remaining text and calls at the end of the text."""
        pending, self._pending = self._pending, ""
        found = self._read(pending) if self._inside else []
        if not found and self._inside and self._must:
            found = self._before_cut(pending)
        if found:
            yield from self._taken(found)
        elif not (self._must and self._had):  # otherwise it is the beginning of one more call
            yield from self._said(self._style.begin + pending if self._marked and self._inside else pending)
        if self._blank and not self._had:
            yield self._blank

    def _begun(self) -> bool:
        """Return True once the beginning of the text decides whether it is bare calls."""
        seen = self._pending.lstrip()
        if not seen or any(bare.startswith(seen) and bare != seen for bare in self._style.bare):
            return False
        self._begins = False
        if seen.startswith(self._style.bare):
            self._inside, self._marked = True, False
        return True

    def _opened(self) -> Generator[str | Found, None, bool]:
        """Yield text up to a begin mark; returns True if there is one."""
        begin = self._style.begin
        place = self._pending.find(begin) if begin else -1
        known = place if place >= 0 else undecided_from(self._pending, begin) if begin else len(self._pending)
        text, self._pending = self._pending[:known], self._pending[known:]
        yield from self._said(text)
        if place < 0:
            return False
        self._pending = self._pending.removeprefix(begin)
        self._inside = self._marked = True
        self._quoted = False
        self._looked = self._ends = 0
        return True

    def _closed(self) -> Generator[str | Found, None, bool]:
        """Yield calls up to an end mark; returns True if there is one."""
        while self._style.end and (place := self._next_end()) >= 0:
            self._ends += 1
            found = self._read(self._pending[:place])
            if found or self._ends == _MOST_ENDS:
                inside, self._pending = self._pending[: self._looked], self._pending[self._looked :]
                self._inside = False
                yield from self._taken(found) if found else self._said(self._style.begin + inside)
                return True
        return False

    def _next_end(self) -> int:
        """Return the offset of the next end mark outside strings, or -1. The search position moves past
        it."""
        while True:
            if self._quoted:
                rest = _STRING_REST.match(self._pending, self._looked)
                self._looked = self._looked if rest is None else rest.end()
                if self._pending[self._looked : self._looked + 1] != '"':
                    return -1
                self._quoted = False
                self._looked += 1
            edge = self._edge.search(self._pending, self._looked)
            if edge is None:
                self._looked = max(self._looked, len(self._pending) - len(self._style.end) + 1)
                return -1
            self._looked = edge.end()
            if edge[0] != '"':
                return edge.start()
            self._quoted = True

    def _read(self, text: str) -> list[Found]:
        try:
            if self._style.typed is not None:
                found = [_checked(*call) for call in self._style.typed(text, self._types)]
            else:
                found = self._style.parse(text)
        except (ValueError, RecursionError):
            return []
        unknown = self._style.known and any(name not in self._names for name, _ in found)
        return [] if unknown else found

    def _types(self, name: str) -> JsonObject:
        """Return the schemas of a function's arguments by name."""
        functions = (tool["function"] for tool in self._tools.functions)
        parameters = next((one.get("parameters") for one in functions if one["name"] == name), None)
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        return properties if isinstance(properties, dict) else {}

    def _before_cut(self, text: str) -> list[Found]:
        """The whole calls at the beginning of a text that was cut in one."""
        found: list[Found] = []
        for call in _leading(text):
            if self._style.known and call[0] not in self._names:
                break
            found.append(call)
        return found

    def _taken(self, found: Sequence[Found]) -> Iterator[Found]:
        self._blank, self._had = "", True
        taken = found[: self._most]
        if self._most is not None:
            self._most -= len(taken)
        yield from taken

    def _said(self, text: str) -> Iterator[str]:
        text = self._blank + text
        length = len(text.rstrip())
        self._blank = text[length:]
        if length:
            yield text[:length]


def _tagged(text: str) -> list[Found]:
    """Parse one call, or a list of calls."""
    return _of(_json(text))


def _bare(text: str) -> list[Found]:
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


def _mistral(text: str) -> list[Found]:
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


def _llama(text: str) -> list[Found]:
    return _bare(text.strip().removeprefix(_BEGIN_LLAMA))


def _checked(name: str, arguments: JsonObject) -> Found:
    """Return a call as it is stored; raises ValueError for one that cannot be."""
    if not _NAME.fullmatch(name):
        raise ValueError("not a name")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for a lone surrogate
    return name, text


def _leading(text: str) -> Iterator[Found]:
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
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or isinstance(name, _Number) or not _NAME.fullmatch(name):
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


_STYLES = {
    CallFormat.HERMES: _Style(_tagged, "<tool_call>", "</tool_call>"),
    CallFormat.MISTRAL: _Style(_mistral, _BEGIN_MISTRAL),
    CallFormat.MISTRAL_NAMED: _Style(_mistral, _BEGIN_MISTRAL),
    CallFormat.LLAMA: _Style(_llama, _BEGIN_LLAMA, bare=("{",), known=True),
    CallFormat.JSON: _Style(_bare, bare=("{", "[", "```"), known=True),
    CallFormat.QWEN_XML: _Style(_tagged, "<tool_call>", "</tool_call>", typed=tagged_calls),
    CallFormat.GLM_XML: _Style(_tagged, "<tool_call>", "</tool_call>", typed=glm_call, known=True),
    CallFormat.GEMMA: _Style(_tagged, "<|tool_call>", "<tool_call|>", typed=gemma_call),
    CallFormat.LFM2: _Style(_tagged, "<|tool_call_start|>", "<|tool_call_end|>", typed=python_calls),
    CallFormat.PYTHONIC: _Style(
        _tagged, "<|python_start|>", "<|python_end|>", bare=("[",), known=True, typed=python_calls
    ),
    CallFormat.GRANITE: _Style(_bare, "<|tool_call|>"),
    CallFormat.PHI: _Style(_bare, "<|tool_call|>", "<|/tool_call|>", bare=("[",), known=True),
    CallFormat.NEMOTRON: _Style(_bare, "<TOOLCALL>", "</TOOLCALL>"),
    CallFormat.TOOL_CALLS: _Style(_bare, "<tool_calls>", "</tool_calls>"),
}

KNOWN = frozenset(_STYLES)
"""The supported syntaxes."""
