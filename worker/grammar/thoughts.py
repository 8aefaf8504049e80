"""An answer that must be something, behind thoughts, which are free."""

import json
from typing import Final

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.reply.reasoning import CHANNELS

_BEHIND: Final = """start: {start}
thoughts[suffix={end}]: {thoughts}
blank: /[ \\n]{{0,4}}/
answer: %lark {{
{answer}
}}"""
"""Models put an empty line between the two. A text cannot end before its thoughts have."""
_SPECIAL: Final = "\\|[](){}.*+?^$/"
_ANYTHING: Final = "(?s:.*)"
FINAL: Final = "<|channel|>final<|message|>"
"""The header of the message that is the answer, in texts of gpt-oss."""
START: Final = "<|start|>assistant"
"""The beginning of the header of each message but the first."""


def behind_thoughts(asked: Constrained, thinking: tuple[str, str], *, opened: bool) -> Constrained:
    """Build the constraint of a text whose answer follows thoughts between these marks.

    `opened`: the prompt has opened them. If not, the model may think, or begin with its answer.
    """
    begin, end = thinking
    said = {"end": end, "kind": str(asked.kind), "text": asked.text}
    if not opened:
        said["begin"] = begin
    return Constrained(ConstraintKind.BEHIND, json.dumps(said, ensure_ascii=False, separators=(",", ":")))


def of_answer(asked: Constrained) -> tuple[Constrained, str]:
    """Return the constraint of the answer alone, and the mark that it follows; "" if it is the whole text.

    Raises ValueError and KeyError for what `behind_thoughts` has not made.
    """
    if asked.kind is not ConstraintKind.BEHIND:
        return asked, ""
    said = json.loads(asked.text)
    end = FINAL if said["end"] == CHANNELS[1] else said["end"]
    return Constrained(ConstraintKind(said["kind"]), said["text"]), end


def marks_of(asked: Constrained) -> str:
    """Return all marks that such a text may have around its thoughts, one behind the other."""
    if asked.kind is not ConstraintKind.BEHIND:
        return ""
    said = json.loads(asked.text)
    return f"{said.get('begin', '')} {said['end']}"


def lark_behind(asked: Constrained, answer: str) -> str:
    """The grammar of a text whose answer has this grammar. Raises as `of_answer` does."""
    said = json.loads(asked.text)
    begin, end = said.get("begin"), said["end"]
    if end == CHANNELS[1]:
        start = f"(thoughts {json.dumps(START)})* {json.dumps(FINAL)} answer"
        thoughts, end = f"/{pattern_of(CHANNELS[0])}{_ANYTHING}/", "<|end|>"
    elif begin is None:
        start, thoughts = "thoughts blank answer", f"/{_ANYTHING}/"
    else:
        start, thoughts = "(thoughts blank)? answer", f"/{pattern_of(begin)}{_ANYTHING}/"
    return _BEHIND.format(
        start=start.removesuffix(" blank") if end != "<|end|>" else start.replace(" answer", " answer"),
        end=json.dumps(end), thoughts=thoughts, answer=answer,
    )  # fmt: skip


def pattern_of(text: str) -> str:
    """A text as a regular expression of Lark."""
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in text)
