"""Says why an answer cannot go on: where in it that is, and what asks for what cannot follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.request.schemas import at_pointer
from nightmill.worker.engine.constraints import STUCK
from nightmill.worker.grammar.thoughts import of_answer

_SHOWN: Final = 60  # characters of the answer
_WITHOUT_EFFECT: Final = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "$defs",
     "definitions", "type", "$anchor", "deprecated", "readOnly", "writeOnly", "x-guidance"}
)  # fmt: skip
_OF_KEYS: Final = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"
)  # fmt: skip


def dead_end(asked: Constrained, text: str) -> str:
    """Describe the dead end behind `text`, the answer so far."""
    alone, end = of_answer(asked)
    answer = text.rpartition(end)[2].lstrip() if end else text
    shown = answer if len(answer) <= _SHOWN else f"...{answer[-_SHOWN:]}"
    where = f"behind {shown!r}" if shown else "at its beginning"
    if alone.kind is ConstraintKind.JSON_SCHEMA and (guilty := _guilty(json.loads(alone.text), answer)):
        return f"{STUCK}, {where}: {guilty} leave no way on; loosen one of them"
    said = "tools" if alone.kind is ConstraintKind.CALLS else str(alone.kind)
    return f"{STUCK}, {where}: {said} leads there, and has no way on; change it so that something can follow"


@dataclass
class _Reading:
    """An answer that ends anywhere: the keys and places of what is open, and what comes next."""

    steps: list[str | int] = field(default_factory=list)
    key_next: bool = False


def _guilty(schema: Any, answer: str) -> str:
    """The keywords that bind at the end of the answer, and their place; empty if none are found."""
    reading = read_open(answer)
    part, place = schema, "#"
    for step in reading.steps:
        part, place = _below(schema, _resolved(schema, part), step, place)
        if part is None:
            return ""
    found = _resolved(schema, part)
    if not isinstance(found, Mapping):
        return ""
    words = [word for word in found if word not in _WITHOUT_EFFECT]
    if reading.key_next:
        words = [word for word in words if word in _OF_KEYS] or words
    return f"{', '.join(map(repr, words))} at {place}" if words else ""


def _resolved(schema: Any, part: Any) -> Any:
    for _ in range(16):  # references may point in a circle
        if not isinstance(part, Mapping) or not isinstance(pointer := part.get("$ref"), str):
            break
        part = at_pointer(schema, pointer)
    return part


def _below(schema: Any, part: Any, step: str | int, place: str) -> tuple[Any, str]:
    """The schema of a property or an item, and its place; None if it is not one alone."""
    if not isinstance(part, Mapping):
        return None, place
    if isinstance(step, str):
        named = part.get("properties")
        if isinstance(named, Mapping) and step in named:
            return named[step], f"{place}/properties/{step[:40]}"
        return None, place
    first, rest = part.get("prefixItems"), part.get("items")
    if isinstance(first, list) and step < len(first):
        return first[step], f"{place}/prefixItems/{step}"
    return rest, f"{place}/items"


def read_open(text: str) -> _Reading:
    """Follow JSON that ends anywhere, as it was written under a grammar."""
    reading = _Reading()
    place = 0
    opened: list[str] = []
    while place < len(text):
        character = text[place]
        if character == '"':
            end = _string_end(text, place)
            if opened[-1:] == ["{"] and reading.key_next and end <= len(text):
                reading.steps[-1] = json.loads(text[place:end])
                reading.key_next = False
            place = end
            continue
        if character in "{[":
            opened.append(character)
            reading.steps.append("" if character == "{" else 0)
            reading.key_next = character == "{"
        elif character in "}]" and opened:
            opened.pop()
            reading.steps.pop()
            reading.key_next = False
        elif character == "," and opened:
            last = reading.steps[-1]
            reading.key_next = opened[-1] == "{"
            reading.steps[-1] = last + 1 if isinstance(last, int) else ""
        place += 1
    if reading.key_next:
        reading.steps.pop()  # of no property yet
    return reading


def _string_end(text: str, place: int) -> int:
    """Behind the mark that closes a string; past the text if that is missing."""
    at = place + 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1
