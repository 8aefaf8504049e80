"""Parsing of tool calls in a text, in each syntax that models use.

Text that turns out not to be a call, since it cannot be parsed or names no function, stays text.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from nightmill.jobs.base.contract import CallFormat, JsonObject, Tools
from nightmill.jobs.reply.call_syntax import (
    Parsed,
    Types,
    gemma_call,
    glm_call,
    invoked_calls,
    python_calls,
    seed_calls,
    tagged_calls,
)
from nightmill.jobs.reply.json_calls import (
    BEGIN_LLAMA,
    BEGIN_MISTRAL,
    NAME,
    Found,
    bare,
    deepseek,
    kimi,
    leading,
    llama,
    mistral,
    tagged,
)
from nightmill.jobs.reply.reasoning import undecided_from

_MOST_ENDS = 8  # end marks outside strings that are tried before the text is given up as a call
# The rest of a JSON string, up to its closing quotation mark.
_STRING_REST = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


class _Style(NamedTuple):
    """A syntax of tool calls in a text.

    begin, end  marks around calls; without an end mark, calls extend to the end of the text
    bare        beginnings of a text that consists of calls alone
    parse       parses the text between the marks; empty if it is not calls
    known       only names of existing functions count, as the text could be any JSON
    typed       parses texts whose values have the types that their function's schema says
    leading     the calls at the beginning of a text that was cut in one
    """

    parse: Callable[[str], Iterable[Found]]
    begin: str = ""
    end: str = ""
    bare: tuple[str, ...] = ()
    known: bool = False
    typed: Callable[[str, Types], Iterable[Parsed]] | None = None
    leading: Callable[[str], Iterable[Found]] = leading


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
            found = list(self._style.parse(text) if self._style.typed is None else self._typed(text))
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
        with suppress(ValueError, RecursionError):
            for call in self._style.leading(text) if self._style.typed is None else self._typed(text):
                if self._style.known and call[0] not in self._names:
                    break
                found.append(call)
        return found

    def _typed(self, text: str) -> Iterator[Found]:
        assert self._style.typed is not None
        return (_checked(*call) for call in self._style.typed(text, self._types))

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


def _checked(name: str, arguments: JsonObject) -> Found:
    """Return a call as it is stored; raises ValueError for one that cannot be."""
    if not NAME.fullmatch(name):
        raise ValueError("not a name")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for a lone surrogate
    return name, text


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_STYLES = {
    CallFormat.HERMES: _Style(tagged, "<tool_call>", "</tool_call>"),
    CallFormat.MISTRAL: _Style(mistral, BEGIN_MISTRAL),
    CallFormat.MISTRAL_NAMED: _Style(mistral, BEGIN_MISTRAL),
    CallFormat.LLAMA: _Style(llama, BEGIN_LLAMA, bare=("{",), known=True),
    CallFormat.JSON: _Style(bare, bare=("{", "[", "```"), known=True),
    CallFormat.QWEN_XML: _Style(tagged, "<tool_call>", "</tool_call>", typed=tagged_calls),
    CallFormat.GLM_XML: _Style(tagged, "<tool_call>", "</tool_call>", typed=glm_call, known=True),
    CallFormat.GEMMA: _Style(tagged, "<|tool_call>", "<tool_call|>", typed=gemma_call),
    CallFormat.LFM2: _Style(tagged, "<|tool_call_start|>", "<|tool_call_end|>", typed=python_calls),
    CallFormat.PYTHONIC: _Style(
        tagged, "<|python_start|>", "<|python_end|>", bare=("[",), known=True, typed=python_calls
    ),
    CallFormat.GRANITE: _Style(bare, "<|tool_call|>"),
    CallFormat.GIGACHAT: _Style(bare, "<|function_call|>"),
    CallFormat.PHI: _Style(bare, "<|tool_call|>", "<|/tool_call|>", bare=("[",), known=True),
    CallFormat.NEMOTRON: _Style(bare, "<TOOLCALL>", "</TOOLCALL>"),
    CallFormat.TOOL_CALLS: _Style(bare, "<tool_calls>", "</tool_calls>"),
    CallFormat.DEEPSEEK: _Style(deepseek, *_DEEPSEEK, leading=deepseek),
    CallFormat.DEEPSEEK_R1: _Style(deepseek, *_DEEPSEEK, leading=deepseek),
    CallFormat.KIMI: _Style(kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", leading=kimi),
    CallFormat.COHERE: _Style(bare, "<|START_ACTION|>", "<|END_ACTION|>"),
    CallFormat.SEED: _Style(tagged, "<seed:tool_call>", "</seed:tool_call>", typed=seed_calls),
    CallFormat.MINIMAX: _Style(tagged, "<minimax:tool_call>", "</minimax:tool_call>", typed=invoked_calls),
}

KNOWN = frozenset(_STYLES)
"""The supported syntaxes."""
