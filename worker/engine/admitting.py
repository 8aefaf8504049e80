"""Waiting sequences, and who of them is admitted: to a slot, and to pages for all of its tokens."""

import heapq
from collections import deque
from itertools import takewhile

from nightmill.worker.engine.holders import Holders
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.sharing import PrefixSharing

Rank = tuple[int, int, int]


class Admitter:
    """The waiting sequences, the preempted included; `waiting` is their number.

    holders            who gets slots and pages
    sharing            finds pages that are there already; None: no pages are shared
    interactive_slots  that only interactive sequences may have
    """

    def __init__(
        self, pool: PagePool, holders: Holders, sharing: PrefixSharing | None, interactive_slots: int
    ) -> None:
        self.waiting = 0
        self._pool = pool
        self._holders = holders
        self._sharing = sharing
        self._interactive_slots = interactive_slots
        self._queue: list[tuple[Rank, Sequence]] = []  # a heap; may hold finished sequences

    def add(self, sequence: Sequence) -> None:
        """Have a new sequence wait."""
        self.waiting += 1
        self._push(sequence)

    def expect(self) -> None:
        """A running sequence waits from now on; `bring` lets it be admitted once no launch uses its pages."""
        self.waiting += 1

    def bring(self, sequences: list[Sequence]) -> None:
        """Let sequences that were expected be admitted again."""
        for sequence in sequences:
            self._push(sequence)

    def finish(self) -> None:
        """A sequence that waited is finished: it stays in the queue, and is left out there."""
        self.waiting -= 1

    def first(self) -> Sequence | None:
        """The sequence to be admitted next."""
        while self._queue and self._queue[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def admit(self, budget: int, *, interactive: bool = False) -> list[Sequence]:
        """Give slots and pages to waiting sequences in order of rank; the first that does not fit ends it.

        So does one that could not begin in this step, since those that rank above it have `budget` tokens of
        prompts to compute: a thousand that come at once delay no step, and keep no slots from their betters.

        One page of each kind for each running sequence is kept back, so that what is admitted now is not
        preempted at the next page border. Where nothing runs there is nothing to keep back for; an
        interactive sequence is not preempted for what ranks below it.

        interactive: only such sequences
        """
        needs, running = self._pool.needs, self._holders.running
        admitted: list[Sequence] = []
        following: list[Sequence] = []  # each has a slot and `promised` its pages kept for it
        promised = 0
        above = deque(sequence for sequence in running if not sequence.decoding)
        while (sequence := self.first()) is not None:
            if interactive and not sequence.request.interactive:
                break
            if len(following) + self._kept(sequence) >= self._holders.free_slots:
                break
            while above and above[0].rank < sequence.rank:
                budget -= _uncomputed(above.popleft())
            if budget < 1:
                break
            pages = self._pool.pages_for(len(sequence.tokens))
            nodes = [] if self._sharing is None else self._sharing.find(sequence)
            if nodes is None:
                assert sequence.follows is not None
                promised += pages - self._pool.pages_for(sequence.follows[1] * needs.segment)
                following.append(heapq.heappop(self._queue)[1])
                continue
            taken = pages - self._pool.pages_for(len(nodes) * needs.segment)
            if self._sharing is not None:
                taken += self._sharing.idle_pages(nodes)
            kept = 0 if sequence.request.interactive else len(running) + len(following)
            kept *= len(needs.kinds)
            if taken + promised + kept > self._pool.free:
                break
            heapq.heappop(self._queue)
            self.waiting -= 1
            self._holders.admit(sequence, nodes)
            budget -= _uncomputed(sequence)
            admitted.append(sequence)
        self.bring(following)
        return admitted

    def _kept(self, sequence: Sequence) -> int:
        """Free slots that this sequence may not have."""
        if sequence.request.interactive or not self._interactive_slots:
            return 0
        interactive = takewhile(lambda one: one.request.interactive, self._holders.running)
        return max(0, self._interactive_slots - sum(1 for _ in interactive))

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.rank, sequence))

    def interactive(self) -> int:
        """Count the interactive sequences that are to be admitted."""
        waiting = (one for _, one in self._queue if one.state is SequenceState.WAITING)
        return sum(one.request.interactive for one in waiting)

    def check_integrity(self) -> None:
        """Audit the number of those that wait; raises CacheIntegrityError."""
        waiting = [one for _, one in self._queue] + self._holders.all
        queued = sum(one.state is SequenceState.WAITING for one in waiting)
        if queued != self.waiting:
            raise CacheIntegrityError(f"{queued} sequences wait, {self.waiting} are counted")


def _uncomputed(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
