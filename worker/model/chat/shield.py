"""Marks the special tokens that a message writes, so that they are told from the template's own.

A mark is a character that occurs nowhere else, put before each special token in the messages; an occurrence
behind a mark is not special. A special token that only the template's text before or after would complete is
marked likewise. Marks that turn out needless cost nothing but a second rendering.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from nightmill.worker.model.tokenizer.finding import alternatives

Messages = Sequence[Mapping[str, Any]]
# Such a role may form a token with the template: '<|' + role + '|>'
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What calls and schemas are made of: templates look for it, and no token can be completed by it.
_STRUCTURE = frozenset(
    {
        "id", "type", "function", "name", "description", "parameters", "arguments", "strict", "text",
        "properties", "required", "items", "enum", "default", "anyOf", "oneOf", "allOf",
        "additionalProperties", "object", "array", "string", "number", "integer", "boolean", "null",
    }
)  # fmt: skip
_SAID = re.compile(r"\S")
_STAND_IN = "x"  # a letter alone, in no special token's text twice in a row
_USUAL_MARK = "\ufdd0"


class Shield:
    """Marks the special tokens `markers`; memory and time to build it are proportional to their length."""

    def __init__(self, markers: Collection[str]) -> None:
        self._starts = _overlapping(markers)
        signs = {char for marker in markers for char in marker if not char.isalnum() and not char.isspace()}
        bare = any(signs.isdisjoint(marker) for marker in markers)
        self._signs = re.compile(
            "." if bare else f"[{re.escape(''.join(sorted(signs)))}]" if signs else "(?!)"
        )
        self._heads = Prefixes(markers)
        self._tails = Prefixes(marker[::-1] for marker in markers)
        self._joined = "\n".join(markers)
        self._longest = max(map(len, markers), default=0)
        self._enclosed = all(signs.issuperset((marker[0], marker[-1])) for marker in markers)

    def mark(self, messages: Messages, mark: str, *, broken: bool = False) -> list[dict[str, Any]]:
        """The messages with `mark` before each special token, and (if `broken`) also within it.

        Every string is looked at, also within parts and tool calls, except ordinary roles.
        """
        return _map_content(messages, lambda text: self._marked(text, mark, broken=broken))

    def divide(self, messages: Messages, mark: str) -> list[dict[str, Any]]:
        """The messages with `mark` before and behind each of their characters, but for ids of calls.

        Whatever a template deletes, replaces, folds or cuts, no special token comes of them.
        """
        return _map_content(
            messages, lambda text: f"{mark}{mark.join(text)}{mark}" if text else text, ids=False
        )

    def leaves(self, texts: Sequence[str]) -> bool:
        """Return whether `mark` would change none of these texts, which are all that messages have.

        Special tokens begin and end with a sign, or nearly all do: then a text without signs has none, nor a
        part of one at its ends, and is a part of one only if it is short.
        """
        return self._enclosed and not self.concerns(texts) and not any(map(self._within_one, texts))

    def _within_one(self, text: str) -> bool:
        core = text.strip()
        return 0 < len(core) < self._longest and core in self._joined

    def concerns(self, texts: Iterable[str]) -> bool:
        """Return whether the texts have a character that marks special tokens, as `<` and `|` do.

        Where a special token has no such character, any text may be a part of it.
        """
        return self._signs.search("\n".join(texts)) is not None

    def _marked(self, text: str, mark: str, *, broken: bool) -> str:
        places = {match.start() for match in self._starts.finditer(text)}
        if broken:
            places |= {place + 1 for place in places}
        core = text.strip()
        lead = len(text) - len(text.lstrip())
        tail = lead + len(core)
        reach = self._longest - 1
        places |= {tail - length for length in self._heads.ending(core[max(0, len(core) - reach) :])}
        if any(self._tails.ending(core[:reach][::-1])):
            places.add(lead)
        if self._within_one(text):
            places.add(lead)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(cuts))


def without_words(messages: Messages, mark: str) -> list[dict[str, Any]]:
    """The messages with all characters but spaces replaced, as many as there were, but for ids of calls."""
    assert mark not in _STAND_IN
    return _map_content(messages, lambda text: _SAID.sub(_STAND_IN, text), ids=False)


class Prefixes:
    """Which texts are the beginning of one of `words`, and shorter than it."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = sorted(words)
        self._firsts = {word[0] for word in self._words}

    def ending(self, text: str) -> Iterator[int]:
        """For which lengths the end of `text` is such a beginning."""
        for length, char in enumerate(reversed(text), 1):
            if char in self._firsts and self._begins_one(text[len(text) - length :]):
                yield length

    def _begins_one(self, text: str) -> bool:
        place = bisect_right(self._words, text)  # what starts with a text follows it in order
        return place < len(self._words) and self._words[place].startswith(text)


def strings(value: Any) -> Iterator[str]:
    """Every text in a value of JSON."""
    found: list[str] = []
    _gather(value, found)
    return iter(found)


def _gather(value: Any, found: list[str]) -> None:
    # What is looked for in an abstract class is looked for long: texts, dicts and lists are known at once.
    if isinstance(value, str):
        found.append(value)
        return
    kind = type(value)
    if kind is dict or (kind is not list and isinstance(value, Mapping)):
        inside: Iterable[Any] = (*value, *value.values())
    elif kind is list or isinstance(value, Sequence):
        inside = value
    else:
        return
    for item in inside:
        if type(item) is str:
            found.append(item)
        else:
            _gather(item, found)


def unused_character(texts: Sequence[str]) -> str:
    """A Unicode noncharacter (or, if all are taken, a private one) that is in none of the texts."""
    if not any(_USUAL_MARK in text for text in texts):
        return _USUAL_MARK
    used = set().union(*texts)
    candidates = chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))
    return next(char for char in map(chr, candidates) if char not in used)


def _overlapping(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each occurrence of one of `texts`, so also of overlapping ones."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    # (?!) never matches. The literal first character lets the search skip what cannot start a token.
    starts = (f"{re.escape(first)}(?={alternatives(rest)})" for first, rest in rests.items())
    return re.compile("|".join(starts) or "(?!)")


def _map_content(
    messages: Messages, change: Callable[[str], str], *, ids: bool = True
) -> list[dict[str, Any]]:
    """The messages with their texts changed; without `ids`, those of calls stay, where they are ordinary."""

    def visit(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict | Mapping):
            return {
                key if key in _STRUCTURE else visit(key): item if stays(key, item) else visit(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [visit(item) for item in value]
        return value

    def stays(key: str, item: Any) -> bool:
        if not isinstance(item, str):
            return False
        is_id = not ids and key in ("id", "tool_call_id") and _ID.fullmatch(item) is not None
        return is_id or (key == "type" and item in _STRUCTURE)

    def is_role(key: str, value: Any) -> bool:
        return key == "role" and isinstance(value, str) and _ROLE.fullmatch(value) is not None

    return [
        {
            key: value if is_role(key, value) or stays(key, value) else visit(value)
            for key, value in message.items()
        }
        for message in messages
    ]
