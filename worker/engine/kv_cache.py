"""Hands out the pages of the KV cache and can prove that none is lost or owned by mistake.

A page holds the keys and values of `block_size` consecutive tokens of a sequence. Pages are counted by
reference: `share` lets a second sequence use a page that is already filled, and a page is free again when
its last owner has released it.
"""

from collections import Counter
from collections.abc import Iterable


class CacheIntegrityError(AssertionError):
    """The page accounting contradicts itself: a bug in the engine, never a property of the input."""


class BlockPool:
    """`blocks` pages of `block_size` tokens, numbered from 0. All methods cost O(pages named)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs pages and a page tokens (got {blocks} pages of {block_size})")
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))  # a stack: the page freed last is warm, and used first
        self._owners = [0] * blocks

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.blocks - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one owner; raises ValueError where there are not that many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to pages that have one; raises ValueError for a free page."""
        for page in pages:
            if self._owners[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page; raises ValueError for a page that has none."""
        for page in pages:
            if self._owners[page] < 1:
                raise ValueError(f"page {page} is released twice")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def check_integrity(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Audit every page against the block tables of all sequences that hold any.

        Raises CacheIntegrityError unless every page is exactly once free or owned, and owned as often as the
        tables name it.
        """
        named = Counter(page for table in block_tables for page in table)
        free = Counter(self._free)
        for page in range(self.blocks):
            if free[page] > 1:
                raise CacheIntegrityError(f"page {page} is {free[page]} times in the free list")
            if free[page] != (self._owners[page] == 0):
                where = "in" if free[page] else "missing from"
                raise CacheIntegrityError(
                    f"page {page} has {self._owners[page]} owners and is {where} the free list"
                )
            if named[page] != self._owners[page]:
                raise CacheIntegrityError(
                    f"page {page} has {self._owners[page]} owners and is in {named[page]} block tables"
                )
        if strangers := sorted((named.keys() | free.keys()) - set(range(self.blocks))):
            raise CacheIntegrityError(f"pages that do not exist are in use: {strangers}")
