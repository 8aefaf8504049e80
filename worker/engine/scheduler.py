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

from nightmill.worker.engine.admitting import Admitter
from nightmill.worker.engine.drafting import Draft, Drafter
from nightmill.worker.engine.holders import Holders
from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.plan import Chunk, StepPlan, next_chunk, whole_prompt
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.sharing import PrefixSharing

INTERACTIVE_TOKENS = 2048
"""Most prompt tokens of a step while there are interactive sequences: they take 45 ms (a 7B on an H200).

16,384 take 350 ms, and two such steps may be queued before the next is planned.
"""
LINGER_STEPS = 256  # after the last interactive sequence: the next is likely to come soon


class Scheduler:
    """Plans steps: who is admitted, who computes how much, who gives way.

    `token_budget` bounds the tokens of a step and must cover one token of each of `max_sequences`.
    `max_given`: tokens of prompts that a step may be asked about if all sequences draw. `prompt_grid`: pieces
    of a prompt end at multiples of so many positions, or with it; 0: it is computed in one step.
    `snapshots`: of states that the runner keeps. Launches are numbered from 1.
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
        sharing = PrefixSharing(pool, grid=prompt_grid, snapshots=snapshots) if prefix_sharing else None
        self._sharing = sharing
        self._holders = Holders(pool, sharing, max_sequences)
        self._admitter = Admitter(pool, self._holders, sharing, interactive_slots)
        self._token_budget = token_budget
        self._max_sequences = max_sequences
        self._max_given = max_given
        self._grid = prompt_grid
        self._whole_prompts = prompt_grid == 0
        self._interactive = 0  # sequences that wait or run
        self._linger = 0  # steps for which prompts are still computed in short pieces
        self.drafter: Drafter | None = None
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, the preempted included."""
        return self._admitter.waiting

    @property
    def running(self) -> int:
        """Sequences that have a slot and are not finished."""
        return len(self._holders.running)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not computed, since their pages were there."""
        return 0 if self._sharing is None else self._sharing.shared_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._interactive += sequence.request.interactive
        self._admitter.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        if sequence.state is not SequenceState.FINISHED:
            self._interactive -= sequence.request.interactive
        if sequence.state is SequenceState.WAITING:
            self._admitter.finish()
        elif sequence.state is SequenceState.RUNNING:
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
            self._sharing.drop(sequence, self._holders.all)
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
        self._admitter.bring(self._holders.release())

    def plan(self) -> StepPlan:
        """Choose the next step."""
        self.release()
        decodes: list[Sequence] = []
        drafts: list[Draft] = []
        grown: list[Sequence] = []
        preempted: list[Sequence] = []
        urgent = self._make_way(preempted)
        settling = self._settling()
        running = self._holders.running
        admitted: list[Sequence] = []
        if self._interactive and not settling:
            admitted = self._admitter.admit(self._token_budget - len(running), interactive=True)
        self._grow(decodes, grown, preempted, urgent)
        if self.drafter is not None:
            decodes, drafts = self._drafts(decodes)
        # A better one may have taken an admitted one's pages.
        admitted = [one for one in admitted if one.state is SequenceState.RUNNING]
        drafted = sum(draft.spare_rows for draft in drafts)
        budget = self._prompt_budget(self._token_budget - len(decodes) - len(drafts) - drafted)
        if not preempted and not settling:
            admitted += self._admitter.admit(budget)
        chunks: list[Chunk] = []
        spare = self._max_sequences - len(running) - drafted
        given = spare + self._max_given
        for sequence in [sequence for sequence in running if not sequence.decoding]:
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
        trimmed, guesses = self._holders.take_trimmed(), False
        if self.drafter is not None:
            guesses = self.drafter.rows(self.running, self.waiting) > 0
        return StepPlan(decodes, chunks, admitted, grown, preempted, drafts, trimmed, guesses)

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
                self._holders.trim(sequence)

    def collected(self, number: int) -> None:
        """All launches up to that one are over."""
        self._holders.collected = number

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
        sequence = self._admitter.first()
        if sequence is None or not sequence.request.interactive or not self._holders.free_slots:
            return False
        needed = self._pool.pages_for(len(sequence.tokens))
        if needed <= self._pool.free:
            return False
        running = self._holders.running
        coming = self._pool.free + self._holders.leaving_pages
        while needed > coming and running and not running[-1].request.interactive:
            coming += running[-1].held_pages
            self._preempt(preempted)
        self.release()
        return self._holders.awaits_launches

    def _grow(
        self, decodes: list[Sequence], grown: list[Sequence], preempted: list[Sequence], urgent: bool
    ) -> None:
        """One token for each generating sequence, best rank first, preempting from the other end.

        urgent: only interactive ones may have further pages
        """
        needs = self._pool.needs
        for sequence in self._holders.running:  # which becomes shorter at its end where sequences give way
            if not sequence.decoding or sequence.computed >= sequence.reach:
                continue  # the latter waits for the token that is being drawn, or that is its last
            if sequence.computed == sequence.room:
                if urgent and not sequence.request.interactive:
                    continue
                if self._windowed:
                    self._holders.trim(sequence)
                lacking = needs.lacking(sequence.tables, sequence.computed)
                if self._pool.free < len(lacking) and not self._make_room(sequence, len(lacking), preempted):
                    continue
                self._holders.extend(sequence, lacking)
                grown.append(sequence)
            decodes.append(sequence)

    def _drafts(self, decodes: list[Sequence]) -> tuple[list[Sequence], list[Draft]]:
        """Divide sequences into those that decode and those that wait for their last token, with guesses.

        Nobody gives way for a guess: it has the pages that are there, or of those that nobody needs now.
        """
        assert self.drafter is not None
        running, needs = self.running, self._pool.needs
        room = min(self._max_sequences - running, self._token_budget - running - 1)
        rows = min(self.drafter.rows(running, self.waiting), room)
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
                self._holders.extend(sequence, lacking)
            draft = draft.within(sequence.room)
            rows -= draft.spare_rows
            room -= draft.spare_rows
            drafts.append(draft)
        return plain, drafts

    def _settling(self) -> bool:
        """Return whether states have to be taken back, which takes rows: nobody gets a slot until then."""
        if self.drafter is None or self.drafter.copies is None:
            return False
        return any(sequence.stale for sequence in self._holders.running)

    def _make_room(self, sequence: Sequence, pages: int, preempted: list[Sequence]) -> bool:
        """Preempt from the lowest rank up until so many pages are free.

        False where `sequence` gave way itself, or has to wait for pages that launches still use.
        """
        while self._pool.free < pages:
            if self._holders.awaits_launches:
                return False
            victim = self._preempt(preempted)  # ranks no higher than `sequence`: it is not in this plan yet
            self.release()
            if victim is sequence:
                return False
        return True

    def _preempt(self, preempted: list[Sequence]) -> Sequence:
        """Have the lowest-ranked running sequence wait again."""
        victim = self._holders.running[-1]
        self._wait_again(victim)
        preempted.append(victim)
        self.preemptions += 1
        return victim

    def _wait_again(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages, once no launch uses them; its tokens are kept."""
        sequence.state = SequenceState.WAITING
        sequence.holds = False
        sequence.let_run()
        self._admitter.expect()
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._holders.leave(sequence)
        if self.drafter is not None and self.drafter.copies is not None:
            self.drafter.copies.leave(sequence)

    def check_integrity(self) -> None:
        """Audit pages, slots and states; raises CacheIntegrityError."""
        self._holders.check_integrity()
        self._admitter.check_integrity()
        holders = self._holders.all
        if self.drafter is not None and self.drafter.copies is not None:
            self.drafter.copies.check_integrity(holders)
        live = (one for one in holders if one.state is not SequenceState.FINISHED)
        if self._admitter.interactive() + sum(one.request.interactive for one in live) != self._interactive:
            raise CacheIntegrityError("interactive sequences are miscounted")
