"""What a text holds: what the model thinks, what it answers, and the calls of tools that it writes.

A text is read as it grows, and the same way at once: pieces joined are what the whole text gives.
"""

import hashlib
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nightmill.jobs.calls import KNOWN, Calls, Found
from nightmill.jobs.contract import Markup, Tools
from nightmill.jobs.thinking import Thoughts

_ID_LENGTH = 9
"""Letters and digits: Mistral's templates refuse other ids, and all take these."""
_ID_LETTERS = string.ascii_letters + string.digits


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
        self._thoughts = None if markup.thinking is None else Thoughts(*markup.thinking, markup.opened)
        self._calls = None
        if tools is not None and markup.calls in KNOWN:
            self._calls = Calls(markup.calls, tools)
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

    def _made(self, found: "Iterator[str | Found]") -> Iterator[Part]:
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
