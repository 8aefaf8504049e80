"""Hands out the pages of the KV cache and can prove that none is lost or owned by mistake.

A page holds the keys and values of some consecutive tokens of a sequence, in the layers of one kind
(`worker.runners.base.PageKind`); any page may be of any kind. Pages are counted by
reference: `share` lets a further sequence use a page that is already filled, and a page is free again when
its last owner has released it.

A page that was marked with `keep` is worth more than its memory: without an owner it is *idle*, keeps what
it holds, and can be shared again. Idle pages count as free; they are given away only when no other page is
left, the one that lost its last owner first going first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from nightmill.worker.engine.page_tables import PageNeeds
from nightmill.worker.runners.base import PageKind


class CacheIntegrityError(AssertionError):
    """The page accounting contradicts itself: a bug in the engine, never a property of the input."""


class PagePool:
    """`pages` pages, numbered from 0. All methods cost O(pages named).

    page_size  tokens of an entry in page tables
    kinds      of its pages; (): one, of `page_size` tokens
    on_evict   told of an idle page that is given away, before it is
    """

    def __init__(self, pages: int, page_size: int, kinds: tuple[PageKind, ...] = ()) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and a page tokens (got {pages} pages of {page_size})")
        self.pages = pages
        self.page_size = page_size
        self.needs = PageNeeds(kinds or (PageKind(None, page_size),))
        self.on_evict: Callable[[int], None] | None = None
        self._empty = list(range(pages - 1, -1, -1))  # a stack: the page freed last is warm, and used first
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently owned first
        self._owners = [0] * pages
        self._kept = [False] * pages

    @property
    def free(self) -> int:
        """Pages that nobody owns, the idle ones among them."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.pages - self.free

    def owners(self, page: int) -> int:
        """Return the number of times that a page is owned."""
        return self._owners[page]

    def pages_for(self, tokens: int) -> int:
        """Pages of all kinds that hold `tokens` tokens."""
        return self.needs.pages_for(tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one owner; raises ValueError where there are not that many."""
        if count > self.free:
            raise ValueError(f"{count} pages wanted, {self.free} free")
        pages = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def keep(self, page: int) -> None:
        """Let an owned page stay findable when its last owner leaves; raises ValueError for a free page."""
        if self._owners[page] < 1:
            raise ValueError(f"page {page} is free: there is nothing in it to keep")
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """Undo `keep`: without an owner the page is free, as any other."""
        self._kept[page] = False
        if page in self._idle:
            del self._idle[page]
            self._empty.append(page)

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to pages that are owned or idle; raises ValueError for one that holds nothing."""
        for page in pages:
            if self._owners[page] < 1:
                if not self._kept[page]:
                    raise ValueError(f"page {page} is free and cannot be shared")
                del self._idle[page]
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner from each page, the last of a sequence first, so that it is evicted before those
        that it follows; raises ValueError for a page that has none."""
        for page in reversed(pages):
            if self._owners[page] < 1:
                raise ValueError(f"page {page} is released twice")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def idle(self) -> list[int]:
        """The idle pages, in the order in which they would be evicted."""
        return list(self._idle)

    def kept(self) -> set[int]:
        """The pages that were marked with `keep`, owned or idle."""
        return {page for page, kept in enumerate(self._kept) if kept}

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept[page] = False
        if self.on_evict is not None:
            self.on_evict(page)
        return page

    def check_integrity(self, page_tables: Iterable[Iterable[int]]) -> None:
        """Audit every page against the page tables of all sequences that hold any.

        Raises CacheIntegrityError unless every page is exactly once free or owned, and owned as often as the
        tables name it.
        """
        named = Counter(chain.from_iterable(page_tables))
        free = Counter([*self._empty, *self._idle])
        for page, (owners, kept) in enumerate(zip(self._owners, self._kept, strict=True)):
            times, holders = free.get(page, 0), named.get(page, 0)
            if times > 1:
                raise CacheIntegrityError(f"page {page} is {times} times in the free list")
            if times != (owners == 0):
                where = "in" if times else "missing from"
                raise CacheIntegrityError(f"page {page} has {owners} owners and is {where} the free list")
            if holders != owners:
                raise CacheIntegrityError(f"page {page} has {owners} owners and is in {holders} page tables")
            if times and kept != (page in self._idle):
                raise CacheIntegrityError(f"page {page} is free, and idle without being kept or the reverse")
        if strangers := sorted((named.keys() | free.keys()) - set(range(self.pages))):
            raise CacheIntegrityError(f"pages that do not exist are in use: {strangers}")
