"""What a text holds: what the model thinks, what it answers, and the calls of tools that it writes.

A text is read as it grows, and the same way at once: pieces joined are what the whole text gives. What is
not a call after all, since it cannot be parsed or names no function, stays text.
"""

import hashlib
import json
import math
import re
import string
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nightmill.jobs.contract import CallFormat, Markup, Tools

_ID_LENGTH = 9
"""Letters and digits: Mistral's templates refuse other ids, and all take these."""
_ID_LETTERS = string.ascii_letters + string.digits
_MOST_ENDS = 8  # marks of an end that may stand within the arguments of a call
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
"""The marks of thinking in models that write messages to several channels, as gpt-oss does."""
_STRAIGHT = {CHANNELS: "<|channel|>final<|message|>"}
"""How an answer begins before which such a model has not thought."""
_BEGIN_MISTRAL, _BEGIN_LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][\w-]{0,64})?(?:\[ARGS\]|(?=\s*\{))\s*")
_BETWEEN = re.compile(r"[\s;,]*")  # calls that follow one another
_MARKS = re.compile(r"(?:\s|\[TOOL_CALLS\])*")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")  # as messages have it
_FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*(?:```)?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called. `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, read. `content` is what it says, without its thoughts and calls."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class Part(NamedTuple):
    """A piece of a reply: one of these."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


def call_id(job_id: str, answer: int, number: int) -> str:
    """The id of an answer's call, always the same."""
    digest = int.from_bytes(hashlib.sha256(f"{job_id}.{answer}.{number}".encode()).digest())
    letters = []
    for _ in range(_ID_LENGTH):
        digest, letter = divmod(digest, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)


class Reading:
    """Reads one text as it grows. `tools`: what the model was told of; calls are looked for only then."""

    def __init__(self, markup: Markup | None, tools: Tools | None, job_id: str, answer: int = 0) -> None:
        markup = markup or Markup()
        self._thoughts = None if markup.thinking is None else _Thoughts(*markup.thinking, markup.opened)
        style = None if tools is None or markup.calls is None else _STYLES.get(markup.calls)
        self._calls = None if style is None or tools is None else _Calls(style, tools)
        self._job_id, self._answer = job_id, answer
        self._number = 0

    def push(self, text: str) -> list[Part]:
        """The parts that this piece completes."""
        if self._thoughts is None:
            return list(self._content(text))
        thought, text = self._thoughts.push(text)
        return [Part(reasoning=thought)] * bool(thought) + list(self._content(text))

    def end(self) -> list[Part]:
        """What was held back until it was known what it is."""
        parts: list[Part] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.end()
            parts += [Part(reasoning=thought)] * bool(thought)
            parts += self._content(text)
        return parts + ([] if self._calls is None else list(self._made(self._calls.end())))

    def _content(self, text: str) -> Iterator[Part]:
        if self._calls is not None:
            yield from self._made(self._calls.push(text))
        elif text:
            yield Part(content=text)

    def _made(self, found: "Iterator[str | _Found]") -> Iterator[Part]:
        for one in found:
            if isinstance(one, str):
                yield Part(content=one)
            else:
                name, arguments = one
                made = ToolCall(call_id(self._job_id, self._answer, self._number), name, arguments)
                self._number += 1
                yield Part(call=made)


def read_reply(text: str, markup: Markup | None, tools: Tools | None, job_id: str, answer: int = 0) -> Reply:
    """What a whole text holds."""
    reading = Reading(markup, tools, job_id, answer)
    parts = reading.push(text) + reading.end()
    reasoning = "".join(part.reasoning for part in parts)
    calls = tuple(part.call for part in parts if part.call is not None)
    return Reply("".join(part.content for part in parts), reasoning or None, calls)


# -- thoughts ------------------------------------------------------------------------------------


class _Thoughts:
    """Tells what stands between the marks of thinking, once and at the beginning, from what follows."""

    def __init__(self, begin: str, end: str, opened: bool) -> None:
        self._begin, self._end = begin, end
        self._straight = _STRAIGHT.get((begin, end), "")
        self._inside, self._over = opened, False
        self._held = ""  # what is not known yet
        self._bare = True  # nothing but white space was seen since the last mark

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, content) that are known now."""
        if self._over:
            return "", self._unless_blank(text)
        self._held += text
        if not self._inside:
            seen = self._held.lstrip()
            if any(mark.startswith(seen) and seen != mark for mark in (self._begin, self._straight)):
                return "", ""
            if not seen.startswith(self._begin):
                self._over, self._bare = True, False
                held = self._released()
                if self._straight and seen.startswith(self._straight):
                    return "", seen.removeprefix(self._straight)
                return "", held
            self._held = seen.removeprefix(self._begin)
            self._inside = True
        place = self._held.find(self._end)
        if place < 0:
            return self._known_thoughts(), ""
        thought = self._unless_blank(self._held[:place]).rstrip()
        rest = self._held[place + len(self._end) :]
        self._over, self._bare, self._held = True, True, ""
        return thought, self._unless_blank(rest)

    def end(self) -> tuple[str, str]:
        """As `push`, of what was held."""
        if self._inside and not self._over:
            return self._unless_blank(self._released()).rstrip(), ""
        return "", self._released()

    def _known_thoughts(self) -> str:
        """All but what may be the end's mark and the white space before it."""
        held = self._held
        known = len(held[: _undecided(held, self._end)].rstrip())
        self._held = held[known:]
        return self._unless_blank(held[:known])

    def _unless_blank(self, text: str) -> str:
        """Without the white space at the beginning."""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text

    def _released(self) -> str:
        held, self._held = self._held, ""
        return held


def _undecided(text: str, mark: str) -> int:
    """Where the end of `text` begins that may turn out to begin `mark`; its length if nothing may."""
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            return start
    return len(text)


# -- calls ---------------------------------------------------------------------------------------

_Found = tuple[str, str]
"""The name of a function and its arguments, a JSON object as text."""


class _Style(NamedTuple):
    """How calls stand in a text.

    begin, end  marks around them; without an end they go on to the end of the text
    bare        how a text begins that is nothing but calls
    parse       the calls between the marks; none if that is not what they are
    known       only functions that there are count: else it may be any JSON
    """

    parse: Callable[[str], list[_Found]]
    begin: str = ""
    end: str = ""
    bare: tuple[str, ...] = ()
    known: bool = False


class _Calls:
    """Tells calls from the text around them; white space between the two belongs to neither."""

    def __init__(self, style: _Style, tools: Tools) -> None:
        self._style = style
        self._names = tools.names
        self._most = None if tools.parallel else 1  # calls that count
        self._held = ""
        self._blank = ""  # white space that counts only if text follows
        self._begins = bool(style.bare)  # nothing but white space was seen
        self._inside = self._marked = self._had = False
        self._looked = 0  # how far the end was looked for
        self._ends = 0

    def push(self, text: str) -> Iterator[str | _Found]:
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

    def end(self) -> Iterator[str | _Found]:
        """What was held."""
        held, self._held = self._held, ""
        found = self._parse(held) if self._inside else []
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

    def _opened(self) -> Generator[str | _Found, None, bool]:
        """Text up to a mark; returns whether there is one."""
        begin = self._style.begin
        place = self._held.find(begin) if begin else -1
        known = place if place >= 0 else _undecided(self._held, begin) if begin else len(self._held)
        text, self._held = self._held[:known], self._held[known:]
        yield from self._said(text)
        if place < 0:
            return False
        self._held = self._held.removeprefix(begin)
        self._inside = self._marked = True
        self._looked = self._ends = 0
        return True

    def _closed(self) -> Generator[str | _Found, None, bool]:
        """Calls up to a mark; returns whether there is one."""
        end = self._style.end
        while end and (place := self._held.find(end, self._looked)) >= 0:
            self._looked = place + len(end)
            self._ends += 1
            found = self._parse(self._held[:place])
            if found or self._ends == _MOST_ENDS:
                inside, self._held = self._held[: self._looked], self._held[self._looked :]
                self._inside = False
                yield from self._taken(found) if found else self._said(self._style.begin + inside)
                return True
        self._looked = max(self._looked, len(self._held) - len(end))
        return False

    def _parse(self, text: str) -> list[_Found]:
        try:
            found = self._style.parse(text)
        except (ValueError, RecursionError):
            return []
        unknown = self._style.known and any(name not in self._names for name, _ in found)
        return [] if unknown else found

    def _taken(self, found: Sequence[_Found]) -> Iterator[_Found]:
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


def _tagged(text: str) -> list[_Found]:
    """One call, or a list of them."""
    return _of(_json(text))


def _bare(text: str) -> list[_Found]:
    """Calls one after another, or a list of them; perhaps in a fence of Markdown."""
    if fenced := _FENCE.fullmatch(text) if text.lstrip().startswith("```") else None:
        text = fenced[1]
    found: list[_Found] = []
    place = _after(_BETWEEN, text, 0)
    while place < len(text):
        value, place = _decoder.raw_decode(text, place)
        found += _of(value)
        place = _after(_BETWEEN, text, place)
    return found


def _mistral(text: str) -> list[_Found]:
    """Lists of calls, and names with their arguments; each may begin with the mark again."""
    found: list[_Found] = []
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


def _llama(text: str) -> list[_Found]:
    return _bare(text.strip().removeprefix(_BEGIN_LLAMA))


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Where what matches at `place`, which may be nothing, ends."""
    found = pattern.match(text, place)
    return place if found is None else found.end()


def _of(value: Any) -> list[_Found]:
    """Raises ValueError for what is not a call or a list of calls."""
    found: list[_Found] = []
    for one in value if isinstance(value, list) else [value]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("not a call")
        arguments: Any = next((one[key] for key in ("arguments", "parameters") if key in one), {})
        found.append((name, _arguments(arguments)))
    return found


def _arguments(value: Any) -> str:
    """Arguments as JSON; a model that was trained on APIs may write them as a text with JSON."""
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    text = json.dumps(value, ensure_ascii=False)
    text.encode()  # raises for half a character, which no file or answer can hold
    return text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not a number of JSON")
    return number


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _json(text: str) -> Any:
    return _decoder.decode(text.strip())


_STYLES = {
    CallFormat.HERMES: _Style(_tagged, "<tool_call>", "</tool_call>"),
    CallFormat.MISTRAL: _Style(_mistral, _BEGIN_MISTRAL),
    CallFormat.MISTRAL_NAMED: _Style(_mistral, _BEGIN_MISTRAL),
    CallFormat.LLAMA: _Style(_llama, _BEGIN_LLAMA, bare=("{",), known=True),
    CallFormat.JSON: _Style(_bare, bare=("{", "[", "```"), known=True),
}
