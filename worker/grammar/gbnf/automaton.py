"""A regular part of a grammar as Glushkov's automaton over classes of characters, to compare two of them.

Sets of characters are bit masks over atoms: the parts into which all sets of the grammar cut the characters.
A repetition of many times counts as one without an end, which takes in more texts: what is found out that way
may be too careful, never too bold.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from nightmill.worker.grammar.gbnf.tree import (
    Characters,
    Choice,
    Node,
    Ranges,
    Reference,
    Repeat,
    Rule,
    Text,
    children,
)

MOST_POSITIONS: Final = 2_000
MOST_EDGES: Final = 30_000
MOST_EXPANDED: Final = 64
"""Positions up to which a repetition is written out."""
MOST_HEIGHT: Final = 200
MOST_PAIRS: Final = 20_000
"""Pairs of positions that are looked at before two parts count as in conflict."""


_LEADS: Final = (
    *((low, low + 0x3F) for low in range(0x80, 0x800, 0x40)),
    *((low, low + 0xFFF) for low in range(0x800, 0x10000, 0x1000)),
    *((low, low + 0x3FFFF) for low in range(0x10000, 0x110000, 0x40000)),
)
"""Code points beyond ASCII by the first byte of their UTF-8."""


class TooLargeError(Exception):
    """The part has more positions than are worth it."""


class Atoms:
    """The smallest parts into which the sets of a grammar cut the characters."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        bounds = {bound for low, high in _LEADS for bound in (low, high + 1)}
        left = list(nodes)
        while left:
            node = left.pop()
            for low, high in _ranges(node):
                bounds.update((low, high + 1))
            left += children(node)
        self._bounds = sorted(bounds)
        self._leads = [self.mask((one,)) for one in _LEADS]

    def mask(self, ranges: Ranges) -> int:
        """The atoms of a set."""
        made = 0
        for low, high in ranges:
            first, after = bisect_left(self._bounds, low), bisect_left(self._bounds, high + 1)
            made |= (1 << after) - (1 << first)
        return made

    def alike(self, mask: int) -> int:
        """The atoms of a set, and those whose characters begin with the same byte as one of it."""
        for lead in self._leads:
            if mask & lead:
                mask |= lead
        return mask


def _ranges(node: Node) -> Ranges:
    if isinstance(node, Characters):
        return node.ranges
    return tuple((ord(one), ord(one)) for one in node.text) if isinstance(node, Text) else ()


@dataclass(slots=True)
class Automaton:
    """Positions with their atoms, where texts begin and end, and what follows each."""

    masks: list[int]
    follow: list[set[int]]
    first: list[int]
    last: list[int]
    nullable: bool

    @property
    def begins(self) -> int:
        """The characters with which a text begins."""
        return self._union(self.first)

    @property
    def goes_on(self) -> int:
        """The characters that a text has behind its first."""
        return self._union({one for group in self.follow for one in group})

    def _union(self, places: Iterable[int]) -> int:
        made = 0
        for place in places:
            made |= self.masks[place]
        return made


class Builder:
    """Makes automata of the regular parts of a grammar; raises TooLargeError."""

    def __init__(self, rules: Mapping[str, Rule], atoms: Atoms) -> None:
        self._rules = rules
        self._atoms = atoms

    def build(self, node: Node) -> Automaton:
        """The automaton of a part that names no recursive rule."""
        self._made = Automaton([], [], [], [], False)
        self._edges = 0
        made = self._made
        made.first, made.last, made.nullable = self._add(node, 0)
        return made

    def _add(self, node: Node, height: int) -> tuple[list[int], list[int], bool]:
        if height > MOST_HEIGHT:
            raise TooLargeError
        if isinstance(node, Reference):
            return self._add(self._rules[node.name].body, height + 1)
        if isinstance(node, Characters):
            return self._positions([self._atoms.mask(node.ranges)])
        if isinstance(node, Text):
            return self._positions([self._atoms.mask(((ord(one), ord(one)),)) for one in node.text])
        if isinstance(node, Repeat):
            return self._repeat(node, height)
        first: list[int] = []
        last: list[int] = []
        if isinstance(node, Choice):
            empty = False
            for item in node.items:
                begins, finishes, void = self._add(item, height + 1)
                first, last, empty = first + begins, last + finishes, empty or void
            return first, last, empty
        empty = True
        for item in node.items:
            first, last, empty = self._join((first, last, empty), self._add(item, height + 1))
        return first, last, empty

    def _positions(self, masks: list[int]) -> tuple[list[int], list[int], bool]:
        begin = len(self._made.masks)
        if begin + len(masks) > MOST_POSITIONS:
            raise TooLargeError
        self._made.masks += masks
        self._made.follow += [{place + 1} for place in range(begin, begin + len(masks) - 1)]
        if not masks:
            return [], [], True
        self._made.follow.append(set())
        return [begin], [begin + len(masks) - 1], False

    def _join(
        self, one: tuple[list[int], list[int], bool], two: tuple[list[int], list[int], bool]
    ) -> tuple[list[int], list[int], bool]:
        self._connect(one[1], two[0])
        return (
            one[0] + (two[0] if one[2] else []),
            two[1] + (one[1] if two[2] else []),
            one[2] and two[2],
        )

    def _connect(self, last: list[int], first: list[int]) -> None:
        self._edges += len(last) * len(first)
        if self._edges > MOST_EDGES:
            raise TooLargeError
        for place in last:
            self._made.follow[place].update(first)

    def _repeat(self, node: Repeat, height: int) -> tuple[list[int], list[int], bool]:
        if node.most == 0:
            return [], [], True
        begin = len(self._made.masks)
        one = self._add(node.item, height + 1)
        size = len(self._made.masks) - begin
        times = node.most if node.most is not None else node.least
        if times > 1 and times * size > MOST_EXPANDED:
            self._connect(one[1], one[0])
            return one[0], one[1], one[2] or node.least == 0
        made = (one[0], one[1], one[2] or node.least == 0)
        for count in range(2, max(1, times) + 1):
            one = self._add(node.item, height + 1)
            made = self._join(made, (one[0], one[1], one[2] or count > node.least))
        if node.most is None:  # the last may come again
            self._connect(one[1], one[0])
        return made


def conflict(one: Automaton, two: Automaton, follow: int) -> bool:
    """Tell whether `two` could go on by a character of `follow` behind a whole text of `one`."""
    last = set(one.last)
    seen = {(a, b) for a in one.first for b in two.first if one.masks[a] & two.masks[b]}
    left = list(seen)
    while left:
        a, b = left.pop()
        if a in last and any(two.masks[after] & follow for after in two.follow[b]):
            return True
        for after_a in one.follow[a]:
            for after_b in two.follow[b]:
                pair = (after_a, after_b)
                if pair not in seen and one.masks[after_a] & two.masks[after_b]:
                    seen.add(pair)
                    left.append(pair)
        if len(seen) > MOST_PAIRS:
            return True
    return False
