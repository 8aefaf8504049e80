"""Decides which tokens are computed next: admission, the token budget, and who gives way when pages run out.

There are no phases. Each step takes one token of every sequence that is generating, then fills what is left
of the budget with prompt tokens in as long chunks as fit. Sequences are ranked: higher priority first, then
earlier submission.

Pages for all tokens that a sequence has are taken at admission, one more each time it grows past a page. When
none is left, the lowest-ranked running sequence gives its pages back and waits to be admitted again; its
tokens are kept, and computed again as one prompt. The highest-ranked sequence never gives way to another, and
fits the pool alone, so there is always one that gets nearer to its end: no livelock.
"""

import heapq
from bisect import insort
from dataclasses import dataclass

from worker.engine.kv_cache import BlockPool, CacheIntegrityError
from worker.engine.request import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `length` tokens of `sequence` from position `start`."""

    sequence: Sequence
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to compute, who took a slot for it, and who lost theirs."""

    chunks: list[Chunk]
    admitted: list[Sequence]
    preempted: list[Sequence]


class Scheduler:
    """Owns the waiting and running sequences, their slots and their pages.

    `token_budget` bounds the tokens of a step and must cover one token of each of `max_sequences`.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, token_budget: int) -> None:
        if max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1 (got {max_sequences})")
        if token_budget < max_sequences:
            raise ValueError(
                f"the token budget of {token_budget} is less than max_sequences ({max_sequences}): "
                "every running sequence needs one token a step"
            )
        self._pool = pool
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; may hold finished sequences
        self._waiting_count = 0
        self._running: list[Sequence] = []  # by rank
        self._leaving: list[Sequence] = []  # no longer running, but launches still use their pages
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, the preempted included."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Sequences that have a slot and are not finished."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting_count += 1
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        if sequence.state is SequenceState.WAITING:
            self._waiting_count -= 1
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._leaving.append(sequence)
        sequence.state = SequenceState.FINISHED

    def release(self) -> None:
        """Take back the pages and slots of sequences that left and that no launch touches any more."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.in_flight:
                self._leaving.append(sequence)
                continue
            self._pool.release(sequence.block_table)
            assert sequence.slot is not None
            self._free_slots.append(sequence.slot)
            sequence.block_table = []
            sequence.slot = None
            sequence.computed = 0
            if sequence.state is SequenceState.WAITING:
                heapq.heappush(self._waiting, (sequence.rank, sequence))

    def plan(self) -> StepPlan:
        """Choose the next step. No chunks: there is nothing to do until a launch is collected."""
        self.release()
        preempted: list[Sequence] = []
        chunks = self._grow(preempted)
        admitted = self._admit() if not preempted else []
        budget = self._token_budget - len(chunks)
        for sequence in self._running:
            if budget < 1:
                break
            if (pending := sequence.pending) > 1 or (pending == 1 and not sequence.computed):
                length = min(pending, budget)
                chunks.append(Chunk(sequence, sequence.computed, length))
                budget -= length
        return StepPlan(chunks, admitted, preempted)

    def _grow(self, preempted: list[Sequence]) -> list[Chunk]:
        """One token for each generating sequence, best rank first, preempting from the other end."""
        chunks: list[Chunk] = []
        running, pool = self._running, self._pool
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if sequence.pending != 1 or not sequence.computed:
                continue
            if sequence.computed == len(sequence.block_table) * pool.block_size:
                if not pool.free and not self._make_room(sequence, preempted):
                    continue
                sequence.block_table += pool.allocate(1)
            chunks.append(Chunk(sequence, sequence.computed, 1))
        return chunks

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Preempt from the lowest rank up until a page is free.

        False where `sequence` gave way itself, or has to wait for pages that launches still use.
        """
        while not self._pool.free:
            if any(leaving.in_flight for leaving in self._leaving):
                return False
            victim = self._running.pop()  # ranks no higher than `sequence`: it is not in this plan yet
            victim.state = SequenceState.WAITING
            self._waiting_count += 1
            self._leaving.append(victim)
            preempted.append(victim)
            self.preemptions += 1
            self.release()
            if victim is sequence:
                return False
        return True

    def _admit(self) -> list[Sequence]:
        """Give slots and pages to waiting sequences in order of rank; the first that does not fit ends it.

        One page for each running sequence is kept back, so that what is admitted now is not preempted at
        the next page border. Where nothing runs there is nothing to keep back for.
        """
        admitted: list[Sequence] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting[0][1]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(self._waiting)
                continue
            pages = self._pool.pages_for(len(sequence.tokens))
            if pages + len(self._running) > self._pool.free:
                break
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            sequence.state = SequenceState.RUNNING
            sequence.slot = self._free_slots.pop()
            sequence.block_table = self._pool.allocate(pages)
            insort(self._running, sequence, key=lambda running: running.rank)
            admitted.append(sequence)
        return admitted

    def check_integrity(self) -> None:
        """Audit pages, slots and states; raises CacheIntegrityError."""
        holders = self._running + self._leaving
        self._pool.check_integrity(sequence.block_table for sequence in holders)
        slots = sorted(self._free_slots + [s.slot for s in holders if s.slot is not None])
        if slots != list(range(self._max_sequences)):
            raise CacheIntegrityError(f"slots are lost or given twice: {slots}")
        for sequence in holders:
            if sequence.computed > len(sequence.block_table) * self._pool.block_size:
                raise CacheIntegrityError(
                    f"{sequence.request.job_id} has computed more tokens than it has pages for"
                )
        if [s.rank for s in self._running] != sorted(s.rank for s in self._running):
            raise CacheIntegrityError("the running sequences are not in order of rank")
        queued = sum(s.state is SequenceState.WAITING for _, s in self._waiting)
        queued += sum(s.state is SequenceState.WAITING for s in self._leaving)
        if queued != self._waiting_count:
            raise CacheIntegrityError(f"{queued} sequences wait, {self._waiting_count} are counted")
