"""Finds any of many texts in another one, in a time that hardly depends on how many they are."""

import re
from collections.abc import Iterable
from itertools import groupby, takewhile

__all__ = ["alternatives", "matcher"]

_DEEPEST = 24  # groups within groups: `re` compiles them by recursion


def matcher(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the leftmost, then longest of `texts`; None if there are none."""
    pattern = alternatives(texts)
    return re.compile(pattern) if pattern else None


def alternatives(texts: Iterable[str]) -> str:
    """A pattern for the longest of `texts` that lies at a place.

    `re` tries alternatives one by one, and Gemma 3 has 6,242 tokens that begin with `<unused`. So what texts
    have in common at their beginning is written once, and what follows are alternatives again.
    """
    return _alternatives(sorted(set(texts)), _DEEPEST)


def _alternatives(texts: list[str], depth: int) -> str:
    if depth == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    patterns = []
    for _, alike in groupby((text for text in texts if text), key=lambda text: text[0]):
        group = list(alike)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(group[0], group[-1], strict=False))
        length = sum(1 for _ in same)  # what the first and the last in order share, all share
        rests = [text[length:] for text in group]
        more = f"(?:{_alternatives(rests, depth - 1)})" if len(group) > 1 else ""
        patterns.append(re.escape(group[0][:length]) + more)
    # One branch at most begins as the text at hand does, so the longest is found first; none comes last.
    return "|".join([*patterns, ""] if texts and texts[0] == "" else patterns)
