"""An answer that must be something, behind thoughts that the prompt has opened, which are free."""

import json
from typing import Final

from nightmill.jobs.base.contract import Constrained, ConstraintKind

_LARK: Final = """start: thoughts blank answer
thoughts[suffix={end}]: /(?s:.*)/
blank: /[ \\n]{{0,4}}/
answer: %lark {{
{answer}
}}"""
"""Models put an empty line between the two. A text cannot end before its thoughts have."""


def behind_thoughts(asked: Constrained, end: str) -> Constrained:
    """Build the constraint of a text whose answer follows thoughts that end with the mark `end`."""
    said = {"end": end, "kind": str(asked.kind), "text": asked.text}
    return Constrained(ConstraintKind.BEHIND, json.dumps(said, ensure_ascii=False, separators=(",", ":")))


def of_answer(asked: Constrained) -> tuple[Constrained, str]:
    """Return the constraint of the answer alone, and the mark that it follows; "" if it is the whole text.

    Raises ValueError and KeyError for what `behind_thoughts` has not made.
    """
    if asked.kind is not ConstraintKind.BEHIND:
        return asked, ""
    said = json.loads(asked.text)
    return Constrained(ConstraintKind(said["kind"]), said["text"]), said["end"]


def lark_behind(answer: str, end: str) -> str:
    """The grammar of a text whose answer has this one."""
    return _LARK.format(end=json.dumps(end), answer=answer)
