"""Guesses at a text's next tokens, so that a step can draw several of them. A draft changes no bit.

A guessed token is computed as a drawn one is, at its place, by itself; and the token that follows it is drawn
by the seed and its place, as it would be without the draft. So the draws of a draft count up to the first
that differs from what was guessed, which is the token that the text goes on with. A wrong guess costs time.

Guesses come of the text itself: summaries, edits, code and data in JSON repeat what stands before. Of answers
under a constraint they come of other answers under it, too, and of what has to follow: keys of an object, the
rest of a choice. Each draw of a draft then has a mask of its own, that of the text with the guesses up to it.

A sequence with a draft cannot run ahead: its last token has to be known. So only those that have something to
guess wait for it (`Sequence.holds`), and only while few run: with many a step's rows are not nearly free.
"""

from dataclasses import dataclass, replace

from nightmill.jobs.base.contract import Constrained
from nightmill.worker.engine.constraints import GrammarBackend
from nightmill.worker.engine.ngrams import Guesses, Habits
from nightmill.worker.engine.request import Sequence

__all__ = ["Draft", "Drafter"]

MOST_GUESSES = 7
"""With the token before them they are as many rows as the fastest products take."""
MOST_ROWS = 64
"""Tokens that all drafts of a step may compute."""
MOST_SEQUENCES = 16
MOST_HABITS = 16
"""Constraints whose answers' habits are kept."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The last token of a sequence, at place `start`, and guesses at those after it, computed in one step.

    Without guesses it is a plain step of a sequence whose slot does not have its last token.
    """

    sequence: Sequence
    start: int
    guesses: tuple[int, ...] = ()

    def within(self, room: int) -> "Draft":
        """The same without the guesses at places from `room` on."""
        return replace(self, guesses=self.guesses[: max(0, room - self.start - 1)])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are computed: the last one, and the guesses."""
        return (self.sequence.tokens[self.start], *self.guesses)


class Drafter:
    """Says which sequences wait for their last token, and what is guessed to follow it."""

    def __init__(self, constraints: GrammarBackend) -> None:
        self._constraints = constraints
        self._habits: dict[Constrained, Habits] = {}
        self.guessed = 0
        self.right = 0
        self.holding = False
        """Some sequence may hold."""

    @staticmethod
    def rows(running: int, waiting: int) -> int:
        """Return how many tokens may be guessed in a step with so many sequences: none where many run."""
        return MOST_ROWS - running if running <= MOST_SEQUENCES and not waiting else 0

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """Guess at most so many tokens after a sequence's last one; none of its draws may be under way."""
        guesses = self.guesses(sequence, min(most, MOST_GUESSES))
        return Draft(sequence, len(sequence.tokens) - 1, guesses)

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
            if sequence.guesses is not None:
                sequence.guesses.learn(len(draft.guesses), right, len(sequence.tokens))

    def follow(self, sequences: list[Sequence], *, active: bool) -> None:
        """Sequences have drawn tokens: let those wait for their last one for which more may be guessed."""
        self.holding = False
        for sequence in sequences:
            under_way = sequence.drawing
            holds = active and len(self.guesses(sequence, under_way + 1)) > under_way
            if holds or sequence.holds:
                sequence.holds = holds
                sequence.let_run()
            self.holding |= holds

    def guesses(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most so many guesses at what follows; none where penalties look at the tokens before.

        Of an answer under a constraint: what its like have there, or it has itself, as far as that may
        follow; then what has to follow.
        """
        if most < 1 or not sequence.may_be_guessed:
            return ()
        if sequence.guesses is None:
            sequence.guesses = Guesses(read=sequence.prompt_length)
        known, constraint = sequence.guesses, sequence.constraint
        if constraint is None:
            return tuple(known.at(sequence.tokens, most))
        guessed = known.at(sequence.tokens, most, self._habits_of(sequence))
        return tuple(self._constraints.guess(constraint, guessed, most))

    def _habits_of(self, sequence: Sequence) -> Habits | None:
        """Those of all answers that obey the same as this one."""
        if (asked := sequence.request.constrained) is None:
            return None
        habits = self._habits.pop(asked, None) or Habits()
        self._habits[asked] = habits  # the last: what was asked for longest ago is first
        if len(self._habits) > MOST_HABITS:
            del self._habits[next(iter(self._habits))]
        return habits
