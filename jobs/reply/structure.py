"""The structure of a model's text: reasoning, the answer and calls of tools, told apart as the text grows.

A style has a parser here, and the marks of a text's `Markup` choose it. Whoever needs to know the parts of a
text asks this module: replies, streams, counts of reasoning tokens, stop strings and budgets of reasoning.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from nightmill.jobs.base.contract import CallFormat, Markup, Tools
from nightmill.jobs.reply.json_calls import Found, arguments_of
from nightmill.jobs.reply.reasoning import CHANNELS, GEMMA, Thoughts, undecided_from
from nightmill.jobs.reply.tool_calls import KNOWN, Calls

__all__ = ["Closing", "Span", "Structure", "closing_of", "structure_of"]

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_LONGEST_END = len("<|return|>")
_LONGEST_HEADER = 512  # characters
_RECIPIENT = re.compile(r"to=([^\s<]{1,300})")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]{1,40})")
_FUNCTIONS = "functions."
_FUNCTION = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_FIRST = (_CHANNEL, "to=", _START, _MESSAGE)
"""Beginnings of the first message: the prompt has written the beginning of its header."""


class Span(NamedTuple):
    """A part of a text: reasoning, content of the answer, or a call."""

    reasoning: str = ""
    content: str = ""
    call: Found | None = None


class Closing(NamedTuple):
    """The marks that end reasoning, as a budget of reasoning writes them.

    inside  where the model reasons
    before  where it has written nothing yet
    """

    inside: str
    before: str


class Structure(Protocol):
    """An incremental parser of one style."""

    @property
    def answer_from(self) -> int | None:
        """Offset of the answer in the whole text, in characters; None until it is known."""
        ...

    @property
    def over(self) -> bool:
        """True once the answer has begun."""
        ...

    @property
    def inside(self) -> bool:
        """True once reasoning has begun, also after its end."""
        ...

    @property
    def closable(self) -> bool:
        """True where the marks that end reasoning may be written: in reasoning, not in a header."""
        ...

    def push(self, text: str) -> list[Span]:
        """Add a piece of the text; returns what it completes."""
        ...

    def end(self) -> list[Span]:
        """End the text; returns what was held back because it was ambiguous."""
        ...


def structure_of(markup: Markup | None, tools: Tools | None = None) -> Structure:
    """Return the parser for a text with this markup. Calls are looked for only if there are `tools`."""
    markup = markup or Markup()
    if markup.thinking == CHANNELS or markup.calls is CallFormat.HARMONY:
        return _Harmony(tools if markup.calls is CallFormat.HARMONY else None)
    calls = Calls(markup.calls, tools) if tools is not None and markup.calls in KNOWN else None
    return _Marked(markup.thinking, markup.opened, calls)


def closing_of(thinking: tuple[str, str], *, calls: bool = False) -> Closing:
    """Return what closes reasoning between these marks: the marks as the model was trained to write them.

    Marks with nothing between them stand for no reasoning. Of gpt-oss the message ends, and the header of the
    final one follows; where there must be `calls`, the model writes the header.
    """
    begin, end = thinking
    if thinking == CHANNELS:
        step = "<|end|><|start|>assistant"
        return Closing(step, "") if calls else Closing(end, end.removeprefix(step))
    if thinking == GEMMA:
        return Closing(end, f"{begin}\n{end}")
    return Closing(f"\n{end}\n\n", f"{begin}\n\n{end}\n\n")


class _Marked:
    """Reasoning between two marks, or none, then the answer, which may hold calls."""

    def __init__(self, thinking: tuple[str, str] | None, opened: bool, calls: Calls | None) -> None:
        self._thoughts = None
        if thinking is not None:
            self._thoughts = Thoughts(*thinking, opened, again=thinking == GEMMA)
        self._calls = calls

    @property
    def answer_from(self) -> int | None:
        return 0 if self._thoughts is None else self._thoughts.answer_from

    @property
    def over(self) -> bool:
        return self._thoughts is None or self._thoughts.over

    @property
    def inside(self) -> bool:
        return self._thoughts is not None and self._thoughts.inside

    @property
    def closable(self) -> bool:
        return self.inside and not self.over

    def push(self, text: str) -> list[Span]:
        if self._thoughts is None:
            return list(self._content(text))
        return [span for thought, said in self._thoughts.push(text) for span in self._spans(thought, said)]

    def end(self) -> list[Span]:
        spans: list[Span] = []
        if self._thoughts is not None:
            spans += self._spans(*self._thoughts.end())
        return spans + ([] if self._calls is None else [_span(item) for item in self._calls.end()])

    def _spans(self, thought: str, said: str) -> Iterator[Span]:
        if thought:
            yield Span(reasoning=thought)
        yield from self._content(said)

    def _content(self, text: str) -> Iterator[Span]:
        if self._calls is not None:
            yield from map(_span, self._calls.push(text))
        elif text:
            yield Span(content=text)


def _span(item: str | Found) -> Span:
    return Span(content=item) if isinstance(item, str) else Span(call=item)


class _Harmony:
    """Messages to channels, as gpt-oss writes them: `<|channel|>NAME<|message|>TEXT<|end|>`, and so on.

    The channel `analysis` is reasoning, a message to `functions.NAME` is a call, all else is the answer.
    The recipient may stand before the channel or behind it. Messages of a kind are joined with a line's end.
    """

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._pending = ""
        self._searched = 0  # characters of it in which no end begins
        self._pushed = 0  # characters
        self._header = ""  # of the message whose body is read; "" also before the first
        self._state = "first"  # first, header, reasoning, content, call, free
        self._had = {"reasoning": False, "content": False}
        self._taken = 0  # calls
        self._separator = ""
        self.answer_from: int | None = None
        self._inside = False

    @property
    def over(self) -> bool:
        return self.answer_from is not None

    @property
    def inside(self) -> bool:
        return self._inside

    @property
    def closable(self) -> bool:
        return self._state == "reasoning" and not self.over

    def push(self, text: str) -> list[Span]:
        self._pushed += len(text)
        self._pending += text
        spans: list[Span] = []
        while self._pending and self._step(spans):
            pass
        return spans

    def end(self) -> list[Span]:
        pending, self._pending = self._pending, ""
        spans: list[Span] = []
        if self._state == "call":
            self._called(pending, spans, cut=True)
        elif self._state in ("reasoning", "content"):
            self._said(self._state, pending, spans)
        elif pending and self._state == "first":  # the beginning of a header is all that there is
            self._answers(len(pending))
            spans.append(Span(content=pending))
        elif pending.strip() and not _START.startswith(pending.strip()) and not self._is_header(pending):
            self._answers(len(pending))
            self._said("content", pending, spans)
        return spans

    def _step(self, spans: list[Span]) -> bool:
        """Go on by a header or a body; False if more text is needed."""
        match self._state:
            case "free":
                self._said("content", self._take(len(self._pending)), spans)
                return False
            case "first" | "header":
                return self._head(spans)
        found = _ENDS.search(self._pending, self._searched)
        if self._state == "call":
            if found is None:
                self._searched = max(0, len(self._pending) - _LONGEST_END + 1)
                return False
            self._called(self._take(found.start()), spans, cut=False)
        else:
            known = self._decided() if found is None else found.start()
            self._said(self._state, self._take(known), spans)
            if found is None:
                return False
        if found[0] != _START:
            self._take(len(found[0]))
        self._state = "header"
        return True

    def _decided(self) -> int:
        """The characters before a possible beginning of a mark."""
        marks = ("<|end|>", "<|call|>", "<|return|>", _START)
        tail = max(0, len(self._pending) - _LONGEST_END)
        return tail + min(undecided_from(self._pending[tail:], mark) for mark in marks)

    def _head(self, spans: list[Span]) -> bool:
        """Read a header, or find that there is none."""
        seen = self._pending.lstrip()
        begins = _FIRST if self._state == "first" else (_START,)
        if not seen or any(begin.startswith(seen) and begin != seen for begin in begins):
            return False
        at = self._pending.find(_MESSAGE)
        if not seen.startswith(begins) or (at < 0 and len(self._pending) > _LONGEST_HEADER):
            self._state = "free"
            self._answers(len(self._pending))
            return True
        if at < 0:
            return False
        self._header = self._take(at + len(_MESSAGE))
        self._state = self._kind()
        if self._state == "reasoning":
            self._inside = True
        else:
            self._answers(len(self._pending))
        if self._had.get(self._state):
            self._separator = "\n"
        return True

    def _is_header(self, text: str) -> bool:
        return text.lstrip().startswith(_START) and len(text) <= _LONGEST_HEADER

    def _kind(self) -> str:
        recipient, channel = _RECIPIENT.search(self._header), _CHANNEL_NAME.search(self._header)
        if recipient is not None and recipient[1].startswith(_FUNCTIONS) and self._tools is not None:
            return "call"
        return "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def _called(self, body: str, spans: list[Span], *, cut: bool) -> None:
        """Add a call; what is none stays text."""
        assert self._tools is not None
        recipient = _RECIPIENT.search(self._header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        most = None if self._tools.parallel else 1
        try:
            if not _FUNCTION.fullmatch(name):
                raise ValueError("no function has such a name")
            arguments = arguments_of(body)
        except (ValueError, RecursionError):
            if not (cut and self._tools.required and self._taken):
                self._said("content", self._header.lstrip() + body, spans)
            return
        self._taken += 1
        if most is None or self._taken <= most:
            spans.append(Span(call=(name, arguments)))

    def _said(self, kind: str, text: str, spans: list[Span]) -> None:
        if not text:
            return
        text, self._separator = self._separator + text, ""
        self._had[kind] = True
        spans.append(Span(reasoning=text) if kind == "reasoning" else Span(content=text))

    def _answers(self, left: int) -> None:
        """Note that the answer begins with the last `left` characters."""
        if self.answer_from is None:
            self.answer_from = self._pushed - left

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        self._searched = 0
        return taken
