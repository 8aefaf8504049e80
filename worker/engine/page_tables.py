"""The pages that a sequence has of each kind: what it needs, what it has, and what it gives back.

A sequence has the pages of all its tokens when it is admitted, and one more of a kind each time it grows past
one. Once a page of a kind with a window holds nothing that a later token sees, it is given back: launches run
in order, so those that are queued have read it before whoever has it next writes it.
"""

import math
from collections.abc import Iterator, Sequence

from nightmill.worker.runners.base import NO_PAGE, PageKind

__all__ = ["KindTable", "PageNeeds", "held_pages"]


class KindTable:
    """A sequence's pages of one kind, in order.

    first  those before this one are given back, or were never its own: NO_PAGE
    """

    __slots__ = ("first", "pages")

    def __init__(self, pages: list[int] | None = None, first: int = 0) -> None:
        self.pages = [] if pages is None else pages
        self.first = first

    @property
    def held(self) -> list[int]:
        """The pages that it has."""
        return self.pages[self.first :] if self.first else self.pages

    def drop(self, until: int) -> list[int]:
        """Take out what it has before the page `until`, and return it."""
        dropped = self.pages[self.first : until]
        self.pages[self.first : until] = [NO_PAGE] * len(dropped)
        self.first += len(dropped)
        return dropped


def held_pages(tables: Sequence[KindTable]) -> int:
    """Count the pages of all kinds that tables have."""
    return sum(len(table.pages) - table.first for table in tables)


class PageNeeds:
    """The number of pages of these kinds that sequences fill.

    segment   so many tokens end pages of all kinds: equal beginnings are shared by segments
    windowed  pages of some kind are given back
    """

    def __init__(self, kinds: tuple[PageKind, ...]) -> None:
        self.kinds = kinds
        self.segment = math.lcm(*(kind.tokens for kind in kinds))
        self.per_segment = [self.segment // kind.tokens for kind in kinds]
        self.windowed = any(kind.window is not None for kind in kinds)
        self._sizes = [kind.tokens for kind in kinds]

    def pages_for(self, tokens: int) -> int:
        """Pages of all kinds that hold `tokens` tokens."""
        return sum(kind.pages_for(tokens) for kind in self.kinds)

    def tokens_in(self, pages: int, length: int) -> int:
        """The tokens that so many pages hold of sequences of `length` tokens, which are computed."""
        return int(pages * length / sum(kind.pages_at(length) for kind in self.kinds))

    def most_tokens(self, pages: int) -> int:
        """The most tokens of a sequence that so many pages hold, all of its tokens at once."""
        fewest, most = 0, pages * max(self._sizes)
        while fewest < most:
            tried = (fewest + most + 1) // 2
            fewest, most = (tried, most) if self.pages_for(tried) <= pages else (fewest, tried - 1)
        return fewest

    def room(self, tables: Sequence[KindTable]) -> int:
        """Tokens for which all of these tables have pages."""
        if len(tables) == 1:
            return len(tables[0].pages) * self._sizes[0]
        return min(len(table.pages) * size for table, size in zip(tables, self._sizes, strict=True))

    def lacking(self, tables: Sequence[KindTable], tokens: int) -> list[KindTable]:
        """Return the tables whose pages hold no more than `tokens` tokens; of one alone that is known."""
        if len(tables) == 1:
            return list(tables)
        sized = zip(tables, self._sizes, strict=True)
        return [table for table, size in sized if len(table.pages) * size <= tokens]

    def first_page(self, kind: int, computed: int) -> int:
        """The first page of a kind that tokens from the place `computed` on see."""
        return self.kinds[kind].first_seen(computed) // self._sizes[kind]

    def unseen(self, tables: Sequence[KindTable], computed: int) -> Iterator[list[int]]:
        """Take from tables the pages that tokens from the place `computed` on do not see."""
        for kind, table in zip(self.kinds, tables, strict=True):
            if kind.window is not None:
                first = kind.first_seen(computed) // kind.tokens
                if first > table.first:
                    yield table.drop(first)
