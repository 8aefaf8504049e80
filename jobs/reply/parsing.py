"""Parsing of a generated text into reasoning, content and tool calls.

A growing text and a whole text are parsed in the same way: the joined deltas equal the result for the whole.
"""

import hashlib
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import Markup, Tools
from nightmill.jobs.reply.reasoning import Thoughts
from nightmill.jobs.reply.tool_calls import KNOWN, Calls, Found

_ID_LENGTH = 9
"""Length of a call's id, in letters and digits: Mistral's templates refuse other ids, and all accept
these."""
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """Return the arguments by name."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed answer. `content` is the text without reasoning and tool calls."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ReplyDelta(NamedTuple):
    """A part of a growing reply: content, reasoning, or a tool call."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


def call_id(job_id: str, answer: int, number: int) -> str:
    """Return the id of a tool call; it depends only on job, answer and number."""
    digest = int.from_bytes(hashlib.sha256(f"{job_id}.{answer}.{number}".encode()).digest())
    letters = []
    for _ in range(_ID_LENGTH):
        digest, letter = divmod(digest, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)


class Reading:
    """An incremental parser of one text. Calls are parsed only if the model was given `tools`."""

    def __init__(self, markup: Markup | None, tools: Tools | None, job_id: str, answer: int = 0) -> None:
        markup = markup or Markup()
        self._thoughts = None if markup.thinking is None else Thoughts(*markup.thinking, markup.opened)
        self._calls = None
        if tools is not None and markup.calls in KNOWN:
            self._calls = Calls(markup.calls, tools)
        self._job_id, self._answer = job_id, answer
        self._number = 0

    def push(self, text: str) -> list[ReplyDelta]:
        """Add a piece of the text; returns the deltas that it completes."""
        if self._thoughts is None:
            return list(self._content(text))
        thought, text = self._thoughts.push(text)
        return [ReplyDelta(reasoning=thought)] * bool(thought) + list(self._content(text))

    def end(self) -> list[ReplyDelta]:
        """Return the deltas that were held back because they were ambiguous."""
        parts: list[ReplyDelta] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.end()
            parts += [ReplyDelta(reasoning=thought)] * bool(thought)
            parts += self._content(text)
        return parts + ([] if self._calls is None else list(self._made(self._calls.end())))

    def _content(self, text: str) -> Iterator[ReplyDelta]:
        if self._calls is not None:
            yield from self._made(self._calls.push(text))
        elif text:
            yield ReplyDelta(content=text)

    def _made(self, found: "Iterator[str | Found]") -> Iterator[ReplyDelta]:
        for item in found:
            if isinstance(item, str):
                yield ReplyDelta(content=item)
            else:
                name, arguments = item
                call = ToolCall(call_id(self._job_id, self._answer, self._number), name, arguments)
                self._number += 1
                yield ReplyDelta(call=call)


def read_reply(text: str, markup: Markup | None, tools: Tools | None, job_id: str, answer: int = 0) -> Reply:
    """Parse a whole text."""
    reading = Reading(markup, tools, job_id, answer)
    parts = reading.push(text) + reading.end()
    reasoning = "".join(part.reasoning for part in parts)
    calls = tuple(part.call for part in parts if part.call is not None)
    return Reply("".join(part.content for part in parts), reasoning or None, calls)
