"""Calls of tools in a text, in each way in which models write them.

What is not a call after all, since it cannot be parsed or names no function, stays text.
"""

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

from nightmill.jobs.contract import CallFormat, Tools
from nightmill.jobs.thinking import undecided_from

_MOST_ENDS = 8  # marks of an end, outside of strings, up to which calls are looked for
_BEGIN_MISTRAL, _BEGIN_LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\]|(?=\s*\{))\s*")
_BETWEEN = re.compile(r"[\s;,]*")  # calls that follow one another
_MARKS = re.compile(r"(?:\s|\[TOOL_CALLS\])*")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")  # as messages have it
# Of a string of JSON, what is left of it up to its closing quotation mark.
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_FENCE = "```"

Found = tuple[str, str]
"""The name of a function and its arguments, a JSON object as text."""


class _Style(NamedTuple):
    """How calls stand in a text.

    begin, end  marks around them; without an end they go on to the end of the text
    bare        how a text begins that is nothing but calls
    parse       the calls between the marks; none if that is not what they are
    known       only functions that there are count: else it may be any JSON
    """

    parse: Callable[[str], list[Found]]
    begin: str = ""
    end: str = ""
    bare: tuple[str, ...] = ()
    known: bool = False


class Calls:
    """Tells calls from the text around them; white space between the two belongs to neither."""

    def __init__(self, written: CallFormat, tools: Tools) -> None:
        """`written`: one of KNOWN."""
        self._style = _STYLES[written]
        self._names = tools.names
        self._most = None if tools.parallel else 1  # calls that count
        self._held = ""
        self._blank = ""  # white space that counts only if text follows
        self._begins = bool(self._style.bare)  # nothing but white space was seen
        self._inside = self._marked = self._had = self._quoted = False
        self._edge = re.compile(f'"|{re.escape(self._style.end)}')
        self._looked = 0  # how far the end was looked for
        self._ends = 0

    def push(self, text: str) -> Iterator[str | Found]:
        """What is known now: text, and calls."""
        self._held += text
        while self._held:
            if self._begins and not self._begun():
                return
            if self._inside:
                if not (yield from self._closed()):
                    return
            elif not (yield from self._opened()):
                return

    def end(self) -> Iterator[str | Found]:
        """What was held."""
        held, self._held = self._held, ""
        found = self._read(held) if self._inside else []
        if found:
            yield from self._taken(found)
        else:
            yield from self._said(self._style.begin + held if self._marked and self._inside else held)
        if self._blank and not self._had:
            yield self._blank

    def _begun(self) -> bool:
        """Whether it is known how the text begins."""
        seen = self._held.lstrip()
        if not seen or any(bare.startswith(seen) and bare != seen for bare in self._style.bare):
            return False
        self._begins = False
        if seen.startswith(self._style.bare):
            self._inside, self._marked = True, False
        return True

    def _opened(self) -> Generator[str | Found, None, bool]:
        """Text up to a mark; returns whether there is one."""
        begin = self._style.begin
        place = self._held.find(begin) if begin else -1
        known = place if place >= 0 else undecided_from(self._held, begin) if begin else len(self._held)
        text, self._held = self._held[:known], self._held[known:]
        yield from self._said(text)
        if place < 0:
            return False
        self._held = self._held.removeprefix(begin)
        self._inside = self._marked = True
        self._quoted = False
        self._looked = self._ends = 0
        return True

    def _closed(self) -> Generator[str | Found, None, bool]:
        """Calls up to a mark; returns whether there is one."""
        while self._style.end and (place := self._next_end()) >= 0:
            self._ends += 1
            found = self._read(self._held[:place])
            if found or self._ends == _MOST_ENDS:
                inside, self._held = self._held[: self._looked], self._held[self._looked :]
                self._inside = False
                yield from self._taken(found) if found else self._said(self._style.begin + inside)
                return True
        return False

    def _next_end(self) -> int:
        """Where the next mark of an end stands outside of strings, or -1. The search goes past it."""
        while True:
            if self._quoted:
                rest = _STRING_REST.match(self._held, self._looked)
                self._looked = self._looked if rest is None else rest.end()
                if self._held[self._looked : self._looked + 1] != '"':
                    return -1
                self._quoted = False
                self._looked += 1
            edge = self._edge.search(self._held, self._looked)
            if edge is None:
                self._looked = max(self._looked, len(self._held) - len(self._style.end) + 1)
                return -1
            self._looked = edge.end()
            if edge[0] != '"':
                return edge.start()
            self._quoted = True

    def _read(self, text: str) -> list[Found]:
        try:
            found = self._style.parse(text)
        except (ValueError, RecursionError):
            return []
        unknown = self._style.known and any(name not in self._names for name, _ in found)
        return [] if unknown else found

    def _taken(self, found: Sequence[Found]) -> Iterator[Found]:
        self._blank, self._had = "", True
        taken = found[: self._most]
        if self._most is not None:
            self._most -= len(taken)
        yield from taken

    def _said(self, text: str) -> Iterator[str]:
        text = self._blank + text
        kept = len(text.rstrip())
        self._blank = text[kept:]
        if kept:
            yield text[:kept]


def _tagged(text: str) -> list[Found]:
    """One call, or a list of them."""
    return _of(_json(text))


def _bare(text: str) -> list[Found]:
    """Calls one after another, or a list of them; perhaps in a fence of Markdown."""
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
    """Lists of calls, and names with their arguments; each may begin with the mark again."""
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


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Where what matches at `place`, which may be nothing, ends."""
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _of(value: Any) -> list[Found]:
    """Raises ValueError for what is not a call or a list of calls."""
    found: list[Found] = []
    for one in value if isinstance(value, list) else [value]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or isinstance(name, _Number) or not _NAME.fullmatch(name):
            raise ValueError("not a call")
        arguments: Any = next((one[key] for key in ("arguments", "parameters") if key in one), {})
        found.append((name, _arguments(arguments)))
    return found


def _arguments(value: Any) -> str:
    """Arguments as JSON; a model that was trained on APIs may write them as a text with JSON."""
    if isinstance(value, str) and not isinstance(value, _Number):
        value = _json(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    text = _written(value)
    text.encode()  # raises for half a character, which no file or answer can hold
    return text


class _Number(str):
    """A number as it was written: of any size, and with each of its digits."""

    __slots__ = ()


def _written(value: Any) -> str:
    """A value of `_decoder` as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(one)}" for key, one in value.items()) + "}"
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
}

KNOWN = frozenset(_STYLES)
"""The formats that are read."""
