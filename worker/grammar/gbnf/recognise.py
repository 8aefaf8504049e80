"""Tells GBNF from Lark's syntax, both of which rows may use for a grammar."""

import re
from typing import Final

_FIRST_RULE: Final = re.compile(r"(?:[ \t\r\n]|\#[^\r\n]*)*[A-Za-z0-9_-]+[ \t]*(?:\#[^\r\n]*)?::=")
_RULE: Final = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_LARK: Final = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)


def is_gbnf(text: str) -> bool | None:
    """Tell whether a grammar is GBNF, and not Lark; None if it is like neither."""
    if _FIRST_RULE.match(text):
        return True
    if _LARK.search(text):
        return False
    return True if _RULE.search(text) else None
