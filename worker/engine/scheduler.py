"""Decides which tokens are computed next: admission, the token budget, and who gives way when pages run out.

There are no phases. Each step takes one token of every sequence that is generating, but for those that wait
for their last token (`Sequence.reach`), then fills what is left of the budget with prompt tokens in as long
chunks as fit. Sequences are ranked: higher priority first, then earlier submission.

Pages for all tokens that a sequence has are taken at admission, one more each time it grows past a page.
Those of kinds with a window are given back as soon as later tokens do not see what they hold. When none is
left, the lowest-ranked running sequence gives its pages back and waits to be admitted again; its tokens are
kept, and computed again: the prompt as at first, the drawn ones as when they were drawn, each by itself, but
several in a step where slots are free. The highest-ranked sequence never gives way to another, and fits the
pool alone, so there is always one that gets nearer to its end: no livelock.

Somebody waits for an interactive sequence. It ranks above all others; `interactive_slots` are kept free for
such; where pages lack for one, the lowest-ranked others give theirs back. While there is one, and a little
longer, a step computes few tokens of prompts, so that no step is long.

Where drafts are made (`Drafter`), sequences that wait for their last token compute guesses at the next ones
behind it, while few run and slots are free: those are rows of the step as other sequences' tokens would be.

Where prefixes are shared (`PrefixSharing`), a sequence takes the pages that are there already and computes
the rest. One that waits for pages that a running sequence is computing keeps its place: what ranks below it
gets neither the slot nor the pages that it will need.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from itertools import takewhile

from nightmill.worker.engine.drafting import Draft, Drafter
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.page_tables import KindTable
from nightmill.worker.engine.plan import Chunk, StepPlan, next_chunk, whole_prompt
from nightmill.worker.engine.prefix_tree import PrefixNode
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.sharing import PrefixSharing
from nightmill.worker.runners.base import NO_PAGE

Rank = tuple[int, int, int]

INTERACTIVE_TOKENS = 2048
"""Most prompt tokens of a step while there are interactive sequences: they take 45 ms (a 7B on an H200).

16,384 take 350 ms, and two such steps may be queued before the next is planned.
"""
LINGER_STEPS = 256  # after the last interactive sequence: the next is likely to come soon


class Scheduler:
    """Owns the waiting and running sequences, their slots and their pages.

    `token_budget` bounds the tokens of a step and must cover one token of each of `max_sequences`.
    `max_given`: tokens of prompts that a step may be asked about if all sequences draw. `prompt_grid`: pieces
    of a prompt end at multiples of so many positions, or with it; 0: it is computed in one step.
    `snapshots`: of states that the runner keeps. `collected` is the number of the newest launch that is over;
    launches are numbered from 1.
    """

    def __init__(
        self, pool: PagePool, *, max_sequences: int, token_budget: int, prefix_sharing: bool = True,
        interactive_slots: int = 0, max_given: int = 1, prompt_grid: int = 1,
        snapshots: int = 0,
    ) -> None:  # fmt: skip
        if max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1 (got {max_sequences})")
        if not 0 <= interactive_slots < max_sequences:
            raise ValueError(
                f"interactive_slots must leave some of {max_sequences} to others (got {interactive_slots})"
            )
        if token_budget < max_sequences - 1 + prompt_grid or max_given < prompt_grid:
            raise ValueError(
                f"the token budget of {token_budget} is too small for max_sequences ({max_sequences}), or "
                f"the {max_given} tokens of prompts that may be asked about are too few: every sequence "
                f"that runs needs one token a step, and one of them {prompt_grid} of its prompt"
            )
        self._pool = pool
        self._windowed = pool.needs.windowed
        self._trimmed: list[Sequence] = []  # since the last plan
        self._sharing = PrefixSharing(pool, grid=prompt_grid, snapshots=snapshots) if prefix_sharing else None
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._max_given = max_given
        self._grid = prompt_grid
        self._whole_prompts = prompt_grid == 0
        self._waiting: list[tuple[Rank, Sequence]] = []  # a heap; may hold finished sequences
        self._waiting_count = 0
        self._running: list[Sequence] = []  # by rank
        self._leaving: list[Sequence] = []  # no longer running, but launches may still use their pages
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._interactive_slots = interactive_slots
        self._interactive = 0  # sequences that wait or run
        self._linger = 0  # steps for which prompts are still computed in short pieces
        self.drafter: Drafter | None = None
        self.preemptions = 0
        self.collected = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, the preempted included."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Sequences that have a slot and are not finished."""
        return len(self._running)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not computed, since their pages were there."""
        return 0 if self._sharing is None else self._sharing.shared_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting_count += 1
        self._interactive += sequence.request.interactive
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        if sequence.state is not SequenceState.FINISHED:
            self._interactive -= sequence.request.interactive
        if sequence.state is SequenceState.WAITING:
            self._waiting_count -= 1
        elif sequence.state is SequenceState.RUNNING:
            del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
            self._leave(sequence)
        sequence.state = SequenceState.FINISHED

    def retry_unshared_after_nan(self, sequence: Sequence) -> bool:
        """A launch found that a sequence's logits are not numbers: whether that may be another's fault.

        It may where it had pages that it did not compute: then it waits to be computed again, alone. In any
        case nobody is given its pages any more.
        """
        if self._sharing is None:
            return False
        if len(sequence.tokens) >= self._pool.needs.segment:
            self._sharing.drop(sequence, [*self._running, *self._leaving])
        if sequence.unshared or not sequence.has_shared_pages:
            return False
        sequence.unshared = True
        sequence.cached = 0
        if sequence.state is SequenceState.RUNNING:
            self._wait_again(sequence)
        sequence.decoding = False  # what launches that ran ahead draw for it counts no more
        sequence.ask_again()
        return True

    def release(self) -> None:
        """Take back the pages and slots of sequences that left and that no launch touches any more."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
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
                heapq.heappush(self._waiting, (sequence.rank, sequence))

    def plan(self) -> StepPlan:
        """Choose the next step."""
        self.release()
        decodes: list[Sequence] = []
        drafts: list[Draft] = []
        grown: list[Sequence] = []
        preempted: list[Sequence] = []
        urgent = self._make_way(preempted)
        settling = self._settling()
        admitted = [] if settling else self._admit(self._token_budget - len(self._running), interactive=True)
        self._grow(decodes, grown, preempted, urgent)
        if self.drafter is not None:
            decodes, drafts = self._drafts(decodes)
        # A better one may have taken an admitted one's pages.
        admitted = [one for one in admitted if one.state is SequenceState.RUNNING]
        drafted = sum(draft.spare_rows for draft in drafts)
        budget = self._prompt_budget(self._token_budget - len(decodes) - len(drafts) - drafted)
        if not preempted and not settling:
            admitted += self._admit(budget)
        chunks: list[Chunk] = []
        spare = self._max_sequences - len(self._running) - drafted
        given = spare + self._max_given
        for sequence in [sequence for sequence in self._running if not sequence.decoding]:
            if budget < 1:
                break
            if self._whole_prompts:
                chunk = whole_prompt(sequence, budget)
            else:
                chunk = next_chunk(sequence, budget, spare, given, self._grid)
            if not chunk.length:
                continue
            if self._sharing is not None:
                chunk = self._sharing.with_snapshot(chunk)
            given -= chunk.rows_asked
            chunks.append(chunk)
            budget -= chunk.length
            spare -= bool(chunk.of_prompt) + chunk.length - chunk.of_prompt - 1
        trimmed, self._trimmed = self._trimmed, []
        return StepPlan(decodes, chunks, admitted, grown, preempted, drafts, trimmed)

    def launched(self, plan: StepPlan, number: int) -> None:
        """The step is queued as launch `number`: advance what it computes."""
        for sequence in plan.decodes:
            sequence.computed += 1
            sequence.last_launch = number
        for draft in plan.drafts:
            sequence = draft.sequence
            sequence.computed = draft.start + len(draft.tokens)
            sequence.reach = max(sequence.reach, sequence.computed)
            sequence.last_launch = number
            sequence.unsettled = bool(draft.guesses)
            assert self.drafter is not None
            self.drafter.launched(draft)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.prompt_logprobs_until = max(sequence.prompt_logprobs_until, chunk.given.stop)
            sequence.decoding = chunk.draws
            sequence.computed = chunk.start + chunk.length
            sequence.last_launch = number
            if self._sharing is not None:
                self._sharing.advance(chunk)
            if self._windowed:
                self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Release the pages that hold nothing which launches after the queued ones read."""
        for pages in self._pool.needs.unseen(sequence.tables, sequence.computed):
            self._pool.release(pages)
            self._trimmed.append(sequence)

    def _prompt_budget(self, tokens: int) -> int:
        """Return how many prompt tokens to compute in a step that has room for `tokens`.

        They are limited while there are interactive sequences, and for some steps afterwards.
        """
        if self._whole_prompts:
            return tokens
        if self._interactive:
            self._linger = LINGER_STEPS
        elif self._linger:
            self._linger -= 1
        else:
            return tokens
        return min(tokens, INTERACTIVE_TOKENS)

    def _make_way(self, preempted: list[Sequence]) -> bool:
        """Preempt what an interactive sequence that waits needs the pages of.

        True while launches still use those pages: until then they are kept for it.
        """
        sequence = self._first_waiting()
        if sequence is None or not sequence.request.interactive or not self._free_slots:
            return False
        needed = self._pool.pages_for(len(sequence.tokens))
        if needed <= self._pool.free:
            return False
        coming = self._pool.free + sum(leaving.held_pages for leaving in self._leaving)
        while needed > coming and self._running and not self._running[-1].request.interactive:
            coming += self._running[-1].held_pages
            self._preempt(preempted)
        self.release()
        return any(leaving.last_launch > self.collected for leaving in self._leaving)

    def _first_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _grow(
        self, decodes: list[Sequence], grown: list[Sequence], preempted: list[Sequence], urgent: bool
    ) -> None:
        """One token for each generating sequence, best rank first, preempting from the other end.

        urgent: only interactive ones may have further pages
        """
        needs = self._pool.needs
        for sequence in self._running:  # which becomes shorter at its end where sequences give way
            if not sequence.decoding or sequence.computed >= sequence.reach:
                continue  # the latter waits for the token that is being drawn, or that is its last
            if sequence.computed == sequence.room:
                if urgent and not sequence.request.interactive:
                    continue
                if self._windowed:
                    self._give_back(sequence)
                lacking = needs.lacking(sequence.tables, sequence.computed)
                if self._pool.free < len(lacking) and not self._make_room(sequence, len(lacking), preempted):
                    continue
                for table in lacking:
                    table.pages += self._pool.allocate(1)
                sequence.room = needs.room(sequence.tables)
                grown.append(sequence)
            decodes.append(sequence)

    def _drafts(self, decodes: list[Sequence]) -> tuple[list[Sequence], list[Draft]]:
        """Divide sequences into those that decode and those that wait for their last token, with guesses.

        Nobody gives way for a guess: it has the pages that are there, or of those that nobody needs now.
        """
        assert self.drafter is not None
        running, needs = len(self._running), self._pool.needs
        room = min(self._max_sequences - running, self._token_budget - running - 1)
        rows = min(self.drafter.rows(running, self._waiting_count), room)
        plain: list[Sequence] = []
        drafts: list[Draft] = []
        self.drafter.ask(decodes, rows)
        for sequence in decodes:
            if not sequence.holds and not sequence.unsettled:
                plain.append(sequence)
                continue
            if sequence.stale and self.drafter.again(sequence) > room:
                continue  # until somebody ends
            length = len(sequence.tokens)
            most = min(rows, sequence.length_limit - 1 - length) if sequence.holds else 0
            draft = self.drafter.draft(sequence, most)
            while length + len(draft.guesses) > sequence.room:
                lacking = needs.lacking(sequence.tables, sequence.room)
                if self._pool.free < running + len(lacking):
                    break
                for table in lacking:
                    table.pages += self._pool.allocate(1)
                sequence.room = needs.room(sequence.tables)
            draft = draft.within(sequence.room)
            rows -= draft.spare_rows
            room -= draft.spare_rows
            drafts.append(draft)
        return plain, drafts

    def _settling(self) -> bool:
        """Return whether states have to be taken back, which takes rows: nobody gets a slot until then."""
        if self.drafter is None or self.drafter.copies is None:
            return False
        return any(sequence.stale for sequence in self._running)

    def _make_room(self, sequence: Sequence, pages: int, preempted: list[Sequence]) -> bool:
        """Preempt from the lowest rank up until so many pages are free.

        False where `sequence` gave way itself, or has to wait for pages that launches still use.
        """
        while self._pool.free < pages:
            if any(leaving.last_launch > self.collected for leaving in self._leaving):
                return False
            victim = self._preempt(preempted)  # ranks no higher than `sequence`: it is not in this plan yet
            self.release()
            if victim is sequence:
                return False
        return True

    def _preempt(self, preempted: list[Sequence]) -> Sequence:
        """Have the lowest-ranked running sequence wait again."""
        victim = self._running[-1]
        self._wait_again(victim)
        preempted.append(victim)
        self.preemptions += 1
        return victim

    def _wait_again(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages, once no launch uses them; its tokens are kept."""
        del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
        sequence.state = SequenceState.WAITING
        sequence.holds = False
        sequence.let_run()
        self._waiting_count += 1
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._leaving.append(sequence)
        if self.drafter is not None and self.drafter.copies is not None:
            self.drafter.copies.leave(sequence)
        if self._sharing is not None:
            self._sharing.stop(sequence)

    def _admit(self, budget: int, *, interactive: bool = False) -> list[Sequence]:
        """Give slots and pages to waiting sequences in order of rank; the first that does not fit ends it.

        So does one that could not begin in this step, since those that rank above it have `budget` tokens of
        prompts to compute: a thousand that come at once delay no step, and keep no slots from their betters.

        One page of each kind for each running sequence is kept back, so that what is admitted now is not
        preempted at the next page border. Where nothing runs there is nothing to keep back for; an
        interactive sequence is not preempted for what ranks below it.

        interactive: only such sequences
        """
        if interactive and not self._interactive:
            return []
        admitted: list[Sequence] = []
        following: list[Sequence] = []  # each has a slot and `promised` its pages kept for it
        promised = 0
        above = deque(sequence for sequence in self._running if not sequence.decoding)
        while (sequence := self._first_waiting()) is not None:
            if interactive and not sequence.request.interactive:
                break
            if len(following) + self._kept(sequence) >= len(self._free_slots):
                break
            while above and above[0].rank < sequence.rank:
                budget -= _uncomputed(above.popleft())
            if budget < 1:
                break
            pages = self._pool.pages_for(len(sequence.tokens))
            nodes = [] if self._sharing is None else self._sharing.find(sequence)
            if nodes is None:
                assert sequence.follows is not None
                promised += pages - self._pool.pages_for(sequence.follows[1] * self._pool.needs.segment)
                following.append(heapq.heappop(self._waiting)[1])
                continue
            taken = pages - self._pool.pages_for(len(nodes) * self._pool.needs.segment)
            if self._sharing is not None:
                taken += self._sharing.idle_pages(nodes)
            kept = 0 if sequence.request.interactive else len(self._running) + len(following)
            kept *= len(self._pool.needs.kinds)
            if taken + promised + kept > self._pool.free:
                break
            heapq.heappop(self._waiting)
            self._give_place(sequence, nodes)
            budget -= _uncomputed(sequence)
            admitted.append(sequence)
        for sequence in following:
            heapq.heappush(self._waiting, (sequence.rank, sequence))
        return admitted

    def _kept(self, sequence: Sequence) -> int:
        """Free slots that this sequence may not have."""
        if sequence.request.interactive or not self._interactive_slots:
            return 0
        interactive = takewhile(lambda one: one.request.interactive, self._running)
        return max(0, self._interactive_slots - sum(1 for _ in interactive))

    def _give_place(self, sequence: Sequence, nodes: list[PrefixNode]) -> None:
        self._waiting_count -= 1
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
        insort(self._running, sequence, key=_rank)

    def check_integrity(self) -> None:
        """Audit pages, slots and states; raises CacheIntegrityError."""
        holders = self._running + self._leaving
        self._pool.check_integrity(table.held for sequence in holders for table in sequence.tables)
        if self._sharing is not None:
            self._sharing.check_integrity(holders)
        if self.drafter is not None and self.drafter.copies is not None:
            self.drafter.copies.check_integrity(holders)
        slots = sorted(self._free_slots + [s.slot for s in holders if s.slot is not None])
        if slots != list(range(self._max_sequences)):
            raise CacheIntegrityError(f"slots are lost or given twice: {slots}")
        for sequence in holders:
            if sequence.room != self._pool.needs.room(sequence.tables):
                raise CacheIntegrityError(f"{sequence.request.job_id} miscounts its pages")
            for kind, table in enumerate(sequence.tables):
                if table.first > self._pool.needs.first_page(kind, sequence.computed):
                    raise CacheIntegrityError(f"{sequence.request.job_id} gave pages back that it needs")
                if any((page == NO_PAGE) != (place < table.first) for place, page in enumerate(table.pages)):
                    raise CacheIntegrityError(f"{sequence.request.job_id} has gaps between its pages")
            if sequence.computed > sequence.room:
                raise CacheIntegrityError(
                    f"{sequence.request.job_id} has computed more tokens than it has pages for"
                )
            if sequence.computed > sequence.reach:
                raise CacheIntegrityError(f"{sequence.request.job_id} runs further ahead than it may")
        if [s.rank for s in self._running] != sorted(s.rank for s in self._running):
            raise CacheIntegrityError("the running sequences are not in order of rank")
        queued = sum(s.state is SequenceState.WAITING for _, s in self._waiting)
        queued += sum(s.state is SequenceState.WAITING for s in self._leaving)
        live = [sequence for _, sequence in self._waiting] + holders
        if (
            sum(s.request.interactive for s in live if s.state is not SequenceState.FINISHED)
            != self._interactive
        ):
            raise CacheIntegrityError("interactive sequences are miscounted")
        if queued != self._waiting_count:
            raise CacheIntegrityError(f"{queued} sequences wait, {self._waiting_count} are counted")


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _uncomputed(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
