"""Slots and their holders: sequences that run, and those that left while launches still use their pages."""

from bisect import bisect_left, insort
from operator import attrgetter

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.page_tables import KindTable
from nightmill.worker.engine.prefix_tree import PrefixNode
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.sharing import PrefixSharing
from nightmill.worker.runners.base import NO_PAGE

_RANK = attrgetter("rank")


class Holders:
    """The sequences that have a slot and pages.

    pool     their pages
    sharing  finds pages that are there already; None: no pages are shared
    slots    sequences that can run at once

    `collected` is the number of the newest launch that is over; launches are numbered from 1.
    """

    def __init__(self, pool: PagePool, sharing: PrefixSharing | None, slots: int) -> None:
        self.running: list[Sequence] = []
        """By rank; those that have a slot and are not finished."""
        self.collected = 0
        self._pool = pool
        self._sharing = sharing
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._leaving: list[Sequence] = []  # no longer running, but launches may still use their pages
        self._trimmed: list[Sequence] = []

    @property
    def free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free_slots)

    @property
    def all(self) -> list[Sequence]:
        """All that have a slot and pages."""
        return self.running + self._leaving

    @property
    def leaving_pages(self) -> int:
        """Pages of those that left, which launches still use."""
        return sum(sequence.held_pages for sequence in self._leaving)

    @property
    def awaits_launches(self) -> bool:
        """True while launches use pages of those that left."""
        return any(sequence.last_launch > self.collected for sequence in self._leaving)

    def admit(self, sequence: Sequence, nodes: list[PrefixNode]) -> None:
        """Let a sequence run, with a free slot, these pages that are there, and others for all its tokens."""
        sequence.state = SequenceState.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.unsettled = sequence.stale = False
        needs = self._pool.needs
        sequence.tables = [KindTable() for _ in needs.kinds]
        if self._sharing is not None:
            sequence.tables = self._sharing.adopt(sequence, nodes)
        for kind, table in zip(needs.kinds, sequence.tables, strict=True):
            table.pages += self._pool.allocate(-(-len(sequence.tokens) // kind.tokens) - len(table.pages))
        sequence.room = needs.room(sequence.tables)
        sequence.computed = len(nodes) * needs.segment
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
        insort(self.running, sequence, key=_RANK)

    def extend(self, sequence: Sequence, lacking: list[KindTable]) -> None:
        """Give a sequence a further free page in each of these of its tables."""
        for table in lacking:
            table.pages += self._pool.allocate(1)
        sequence.room = self._pool.needs.room(sequence.tables)

    def trim(self, sequence: Sequence) -> None:
        """Release the pages that hold nothing which launches after the queued ones read."""
        for pages in self._pool.needs.unseen(sequence.tables, sequence.computed):
            self._pool.release(pages)
            self._trimmed.append(sequence)

    def take_trimmed(self) -> list[Sequence]:
        """Return the sequences that gave pages back since the last call."""
        trimmed, self._trimmed = self._trimmed, []
        return trimmed

    def leave(self, sequence: Sequence) -> None:
        """A sequence runs no longer: `release` takes its slot and pages once no launch uses them."""
        del self.running[bisect_left(self.running, sequence.rank, key=_RANK)]
        self._leaving.append(sequence)
        if self._sharing is not None:
            self._sharing.stop(sequence)

    def release(self) -> list[Sequence]:
        """Take back what those hold that left and that no launch touches; returns who of them wait again."""
        if not self._leaving:
            return []
        leaving, self._leaving = self._leaving, []
        waiting = []
        for sequence in leaving:
            if sequence.last_launch > self.collected:
                self._leaving.append(sequence)
                continue
            if self._sharing is not None:
                self._sharing.leave(sequence)
            for table in sequence.tables:
                self._pool.release(table.held)
            assert sequence.slot is not None
            self._free_slots.append(sequence.slot)
            sequence.tables = []
            sequence.slot = None
            sequence.computed = sequence.room = 0
            sequence.decoding = False
            if sequence.state is SequenceState.WAITING:
                waiting.append(sequence)
        return waiting

    def check_integrity(self) -> None:
        """Audit pages and slots; raises CacheIntegrityError."""
        holders, needs = self.all, self._pool.needs
        self._pool.check_integrity(table.held for sequence in holders for table in sequence.tables)
        if self._sharing is not None:
            self._sharing.check_integrity(holders)
        slots = sorted(self._free_slots + [one.slot for one in holders if one.slot is not None])
        if slots != list(range(self._slots)):
            raise CacheIntegrityError(f"slots are lost or given twice: {slots}")
        for sequence in holders:
            job_id = sequence.request.job_id
            if sequence.room != needs.room(sequence.tables):
                raise CacheIntegrityError(f"{job_id} miscounts its pages")
            for kind, table in enumerate(sequence.tables):
                if table.first > needs.first_page(kind, sequence.computed):
                    raise CacheIntegrityError(f"{job_id} gave pages back that it needs")
                if any((page == NO_PAGE) != (place < table.first) for place, page in enumerate(table.pages)):
                    raise CacheIntegrityError(f"{job_id} has gaps between its pages")
            if sequence.computed > sequence.room:
                raise CacheIntegrityError(f"{job_id} has computed more tokens than it has pages for")
            if sequence.computed > sequence.reach:
                raise CacheIntegrityError(f"{job_id} runs further ahead than it may")
        if [one.rank for one in self.running] != sorted(one.rank for one in self.running):
            raise CacheIntegrityError("the running sequences are not in order of rank")
