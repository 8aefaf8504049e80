"""Guesses at a text's next tokens, so that a step can draw several of them. A draft changes no bit.

A guessed token is computed as a drawn one is, at its place, by itself; and the token that follows it is drawn
by the seed and its place, as it would be without the draft. So the draws of a draft count up to the first
that differs from what was guessed, which is the token that the text goes on with. A wrong guess costs time.

Guesses come of the text itself: summaries, edits, code and data in JSON repeat what stands before. Of answers
under a constraint they come of other answers under it, too, and of what has to follow: keys of an object, the
rest of a choice. Each draw of a draft then has a mask of its own, that of the text with the guesses up to it.

Layers with states go through guesses, too. So the states are copied before, and taken back where a guess was
wrong; the tokens since then are computed again in the step of the next draft, each as it was drawn.

A sequence with a draft cannot run ahead: its last token has to be known. So only those that have something to
guess wait for it (`Sequence.holds`), and only while few run: with many a step's rows are not nearly free.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from nightmill.jobs.base.contract import Constrained
from nightmill.worker.engine.constraints import GrammarBackend
from nightmill.worker.engine.kv_cache import CacheIntegrityError
from nightmill.worker.engine.ngrams import Guesses, Habits
from nightmill.worker.engine.payoff import Payoff
from nightmill.worker.engine.request import Sequence
from nightmill.worker.runners.base import NO_SNAPSHOT

__all__ = ["MOST_SEQUENCES", "Draft", "Drafter", "Drafts", "Guesser", "StateCopies"]


class Drafts(StrEnum):
    """The choices of `--drafts`."""

    OFF = "off"
    NGRAM = "ngram"
    """Always while few sequences run."""
    AUTO = "auto"
    """While few run and steps with guesses are found to give more tokens per second (`payoff`)."""


MOST_GUESSES = 7
"""With the token before them they are as many rows as the fastest products take."""
WORTH_A_WAIT = 3
"""Fewest guesses for which a sequence that runs ahead begins to wait: that takes as long as a step or two."""
MOST_ROWS = 64
"""Tokens that all drafts of a step may compute."""
MOST_SEQUENCES = 16
MOST_HABITS = 16
"""Constraints whose answers' habits are kept."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The last token of a sequence, at place `start`, and guesses at those after it, computed in one step.

    Without guesses it is a plain step of a sequence whose slot does not have its last token.

    again     tokens before the last one that are computed again, since states went through wrong guesses
    keeps     the place that the slot's states are copied to before, if they are
    restores  the place that they are taken back from before, if they are
    """

    sequence: Sequence
    start: int
    guesses: tuple[int, ...] = ()
    again: int = 0
    keeps: int = NO_SNAPSHOT
    restores: int = NO_SNAPSHOT

    def within(self, room: int) -> "Draft":
        """The same without the guesses at places from `room` on."""
        guesses = self.guesses[: max(0, room - self.start - 1)]
        return replace(self, guesses=guesses, keeps=self.keeps if guesses else NO_SNAPSHOT)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that draws follow: the last one, and the guesses."""
        return (self.sequence.tokens[self.start], *self.guesses)

    @property
    def known(self) -> list[int]:
        """The tokens that are computed again, before these."""
        return self.sequence.tokens[self.start - self.again : self.start]

    @property
    def spare_rows(self) -> int:
        """Rows of a step that it takes beside one for its sequence."""
        return self.again + len(self.guesses)


class StateCopies:
    """Places of copies of states, one for each sequence that guesses.

    first, places  the runner's snapshots with numbers from `first` on, so many of them
    """

    def __init__(self, first: int, places: int) -> None:
        self._first, self._places = first, places
        self._free = list(range(first + places - 1, first - 1, -1))

    def take(self, sequence: Sequence) -> bool:
        """Give a sequence a place, if there is one and it has none; true if it has one then."""
        if sequence.copy == NO_SNAPSHOT and self._free:
            sequence.copy = self._free.pop()
        return sequence.copy != NO_SNAPSHOT

    def leave(self, sequence: Sequence) -> None:
        """Take the place back, if a sequence has one. Launches run in order: another may have it at once."""
        if sequence.copy != NO_SNAPSHOT:
            self._free.append(sequence.copy)
            sequence.copy = NO_SNAPSHOT

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Audit the places; raises CacheIntegrityError."""
        places = sorted([*self._free, *(one.copy for one in holders if one.copy != NO_SNAPSHOT)])
        if places != list(range(self._first, self._first + len(places))) or len(places) != self._places:
            raise CacheIntegrityError(f"places of copies are lost or given twice: {places}")


class Guesser(Protocol):
    """A model that goes on with texts (`draft_model`)."""

    def guess(self, sequences: list[Sequence], most: int, /) -> list[tuple[int, ...]]:
        """At most so many guesses for each text; none for one that it cannot read. Raises RunnerError."""
        ...

    def close(self) -> None:
        """Release what it holds; safe to call twice."""
        ...


class Drafter:
    """Says which sequences wait for their last token, and what is guessed to follow it.

    constraints  the engine's
    copies       places of copies of states, if the runner has states
    payoff       says whether drafts pay; None: they do
    """

    def __init__(
        self, constraints: GrammarBackend, copies: StateCopies | None = None, payoff: Payoff | None = None
    ) -> None:
        self.copies = copies
        self.model: Guesser | None = None
        """Is asked where a text's own words say nothing."""
        self._payoff = payoff
        self._constraints = constraints
        self._habits: dict[Constrained, Habits] = {}
        self.guessed = 0
        self.right = 0
        self._holding: set[Sequence] = set()
        self.predicts = False
        """The runner guesses, too, behind each token that it draws."""

    def rows(self, running: int, waiting: int) -> int:
        """Return how many tokens may be guessed in a step with so many sequences: none where many run."""
        if running > MOST_SEQUENCES or waiting or (self._payoff is not None and not self._payoff.drafting):
            return 0
        return MOST_ROWS - running

    def drew(self, running: int, waiting: int, tokens: int, *, prompts: bool) -> None:
        """A launch was collected, by which sequences got so many tokens; `prompts`: it computed some, too."""
        if self._payoff is None:
            return
        if prompts or waiting or not 0 < running <= MOST_SEQUENCES:
            self._payoff.interrupt()
        else:
            self._payoff.drew(running, tokens)

    def ask(self, sequences: list[Sequence], most: int) -> None:
        """Have the model guess for those of these that have nothing to guess by their own words."""
        if self.model is None or most < 1:
            return
        asking = [one for one in sequences if one.holds and one.may_be_guessed and not self._own(one, 1)]
        if not asking:
            return
        for sequence, guesses in zip(asking, self.model.guess(asking, MOST_GUESSES), strict=True):
            sequence.asked = len(sequence.tokens), guesses

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """Guess at most so many tokens after a sequence's last one; none of its draws may be under way.

        Where there are states, also say what is computed again; without a place for a copy guess nothing.
        """
        start, copies = len(sequence.tokens) - 1, self.copies
        if copies is None:
            return Draft(sequence, start, self.guesses(sequence, min(most, MOST_GUESSES)))
        again = self.again(sequence)
        most = min(most, MOST_GUESSES) - again if copies.take(sequence) else 0
        draft = Draft(sequence, start, self.guesses(sequence, most), again)
        if sequence.stale:
            return replace(draft, restores=sequence.copy)
        return replace(draft, keeps=sequence.copy) if draft.guesses else draft

    @staticmethod
    def again(sequence: Sequence) -> int:
        """Return how many tokens before its last one are computed again."""
        return len(sequence.tokens) - 1 - sequence.copied if sequence.stale else 0

    def launched(self, draft: Draft) -> None:
        """A draft is computed: its states are those of all guesses."""
        sequence = draft.sequence
        if draft.keeps != NO_SNAPSHOT:
            sequence.copied = draft.start
        sequence.stale = False

    def settle(self, drafts: list[Draft], launch: int) -> None:
        """The draws of a launch are told: go on from what was right of its drafts."""
        for draft in drafts:
            sequence = draft.sequence
            if sequence.slot is None or sequence.last_launch != launch:
                continue
            right = max(0, len(sequence.tokens) - draft.start - 2)
            self.guessed += len(draft.guesses)
            self.right += right
            sequence.computed = len(sequence.tokens) - 1
            sequence.stale = self.copies is not None and right < len(draft.guesses)
            sequence.let_run()
            if sequence.guesses is not None:
                sequence.guesses.learn(len(draft.guesses), right, len(sequence.tokens))

    def follow(self, sequences: list[Sequence]) -> None:
        """Sequences have drawn tokens: let those wait for their last one for which more may be guessed."""
        self._holding = {one for one in self._holding if one.holds}
        for sequence in sequences:
            under_way = sequence.drawing
            fewest = under_way + WORTH_A_WAIT if under_way else 1
            holds = (self.model is not None or self.predicts) and sequence.may_be_guessed
            holds = holds or len(self.guesses(sequence, fewest)) == fewest
            self._hold(sequence, holds)

    def let_run(self) -> None:
        """Too many run: nobody waits for its last token, but for draws of drafts that are under way."""
        for sequence in [one for one in self._holding if not (one.unsettled and one.drawing)]:
            self._hold(sequence, False)

    def _hold(self, sequence: Sequence, holds: bool) -> None:
        if holds:
            self._holding.add(sequence)
        else:
            self._holding.discard(sequence)
            if self.copies is not None and not sequence.stale:
                self.copies.leave(sequence)
        if holds or sequence.holds:
            sequence.holds = holds
            sequence.let_run()

    def guesses(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most so many guesses at what follows; none where penalties look at the tokens before.

        By the text's own words or, where these say nothing, as the model has said when it was asked, or the
        runner with the last token.
        """
        if most < 1 or not sequence.may_be_guessed:
            return ()
        guesses = self._own(sequence, most)
        length, asked = sequence.asked
        if guesses or length != len(sequence.tokens):
            return guesses
        if sequence.guesses is not None:
            sequence.guesses.own = False
        if sequence.constraint is None:
            return asked[:most]
        return tuple(self._constraints.guess(sequence.constraint, asked, most))

    def _own(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guesses by words of the text.

        Of an answer under a constraint: what its like have there, or it has itself, as far as that may
        follow; then what has to follow.
        """
        if sequence.guesses is None:
            sequence.guesses = Guesses(read=sequence.prompt_length)
        known, constraint, length = sequence.guesses, sequence.constraint, len(sequence.tokens)
        if constraint is None:
            return tuple(known.at(sequence.tokens, most))
        if known.followed[0] != length:  # it is asked when it has drawn, and again for its next step
            guessed = known.at(sequence.tokens, MOST_GUESSES, self._habits_of(sequence))
            known.followed = length, tuple(self._constraints.guess(constraint, guessed, MOST_GUESSES))
        return known.followed[1][:most]

    def _habits_of(self, sequence: Sequence) -> Habits | None:
        """Return the habits of all answers that obey the same as this one."""
        if (asked := sequence.request.constrained) is None:
            return None
        habits = self._habits.pop(asked, None) or Habits()
        self._habits[asked] = habits  # the last: what was asked for longest ago is first
        if len(self._habits) > MOST_HABITS:
            del self._habits[next(iter(self._habits))]
        return habits
