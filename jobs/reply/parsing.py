"""Parsing of a generated text into reasoning, content and tool calls.

A growing text and a whole text are parsed in the same way: the joined deltas equal the result for the whole.
"""

import hashlib
import json
import string
from dataclasses import dataclass
from typing import Any, NamedTuple

from nightmill.jobs.base.contract import Markup, Tools
from nightmill.jobs.reply.structure import Span, structure_of

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
    """A parsed answer. `content` is the text without reasoning and tool calls.

    unfinished  the text ends in its reasoning, so that there is no answer
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    unfinished: bool = False


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
        self._structure = structure_of(markup, tools)
        self._job_id, self._answer = job_id, answer
        self._number = 0

    @property
    def reasons(self) -> bool:
        """True while the text is in its reasoning."""
        return self._structure.inside and not self._structure.over

    def push(self, text: str) -> list[ReplyDelta]:
        """Add a piece of the text; returns the deltas that it completes."""
        return [self._delta(span) for span in self._structure.push(text)]

    def end(self) -> list[ReplyDelta]:
        """Return the deltas that were held back because they were ambiguous."""
        return [self._delta(span) for span in self._structure.end()]

    def _delta(self, span: Span) -> ReplyDelta:
        if span.call is None:
            return ReplyDelta(span.content, span.reasoning)
        name, arguments = span.call
        call = ToolCall(call_id(self._job_id, self._answer, self._number), name, arguments)
        self._number += 1
        return ReplyDelta(call=call)


def read_reply(text: str, markup: Markup | None, tools: Tools | None, job_id: str, answer: int = 0) -> Reply:
    """Parse a whole text."""
    reading = Reading(markup, tools, job_id, answer)
    parts = reading.push(text)
    unfinished = reading.reasons
    parts += reading.end()
    reasoning = "".join(part.reasoning for part in parts)
    calls = tuple(part.call for part in parts if part.call is not None)
    return Reply("".join(part.content for part in parts), reasoning or None, calls, unfinished)
