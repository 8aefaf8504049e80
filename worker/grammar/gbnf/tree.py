"""A grammar as a tree: what its rules are made of, and the sets of characters at its leaves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""Code points, as inclusive ranges in ascending order that do not touch."""

_UNIVERSE: Final[Ranges] = ((1, 0xD7FF), (0xE000, 0x10FFFF))
"""Characters of texts: without U+0000, which neither llama.cpp nor a database takes, and surrogates."""


class GbnfError(ValueError):
    """The grammar cannot be used; the message says where, and what to write."""


@dataclass(frozen=True, slots=True, eq=False)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """These characters in a row; the empty text as well."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Concatenation:
    """All items, one behind the other."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of the items."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """An item `least` to `most` times; None: any number of times."""

    item: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The texts of another rule. `place`: of the name, in the text."""

    name: str
    place: int


Node = Characters | Text | Concatenation | Choice | Repeat | Reference


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule and its place in the text."""

    name: str
    body: Node
    place: int


def children(node: Node) -> tuple[Node, ...]:
    """The nodes right below one."""
    if isinstance(node, Concatenation | Choice):
        return node.items
    return (node.item,) if isinstance(node, Repeat) else ()


def references(node: Node) -> Iterator[Reference]:
    """The rules that a node names."""
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, Reference):
            yield one
        left += reversed(children(one))


def set_of(ranges: list[tuple[int, int]]) -> Ranges:
    """The characters of texts in these ranges, which may overlap."""
    inside = [
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in _UNIVERSE
        if max(low, first) <= min(high, last)
    ]
    made: list[tuple[int, int]] = []
    for low, high in sorted(inside):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def all_but(ranges: list[tuple[int, int]]) -> Ranges:
    """The characters of texts outside of these ranges."""
    made, after = [], 0
    for low, high in sorted(ranges):
        made.append((after, low - 1))
        after = max(after, high + 1)
    return set_of([*made, (after, 0x10FFFF)])


ANY: Final = Characters(_UNIVERSE)
"""`.`: line ends as well."""
