"""Launches that were not collected yet: whom what they return is for."""

from dataclasses import dataclass, field
from typing import Any

from nightmill.worker.engine.plan import StepPlan
from nightmill.worker.engine.request import Sequence, SequenceState

__all__ = ["Launch"]


@dataclass(slots=True)
class Launch:
    """An outstanding launch."""

    number: int
    plan: StepPlan
    drawing: list[Sequence | None]  # in the order of the tokens it will return; None: nobody wants that one
    asking: list[Sequence | None]  # the same of tokens of prompts, which are told after those
    embedding: list[Sequence | None]  # whose embeddings it completes
    masked: list[int]  # places in `drawing` of those that draw under a mask
    ahead: dict[int, Any] = field(default_factory=dict)
    """Constraints of draws behind guesses, by place: each has accepted these guesses."""

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants what this launch computes for a sequence."""
        for others in (self.drawing, self.asking, self.embedding):
            others[:] = [None if other is sequence else other for other in others]

    def wanting(self, place: int) -> Sequence | None:
        """Who is to get the token that is drawn at a place, if anybody still is."""
        sequence = self.drawing[place]
        return None if sequence is None or sequence.state is SequenceState.FINISHED else sequence

    def drop_rest(self, place: int) -> None:
        """Drop what was drawn for a sequence behind a place: it followed a guess that was wrong."""
        self.drop_from(place + 1, self.drawing[place])

    def drop_from(self, place: int, sequence: Sequence | None) -> int:
        """Drop what is drawn for a sequence from a place on; return how many draws that are."""
        first = place
        while place < len(self.drawing) and self.drawing[place] is sequence:
            self.drawing[place] = None
            place += 1
        return place - first

    def before(self) -> dict[int, tuple[int, ...]]:
        """Return the guesses that draws follow by the place in `drawing` of the draw."""
        following: dict[int, tuple[int, ...]] = {}
        place = len(self.plan.decodes)
        for draft in self.plan.drafts:
            for count in range(1, len(draft.tokens)):
                following[place + count] = draft.guesses[:count]
            place += len(draft.tokens)
        return following

    def guesses(self) -> dict[int, int]:
        """Return the guesses by the place in `drawing` of the draw that each is compared with."""
        guessed: dict[int, int] = {}
        place = len(self.plan.decodes)
        for draft in self.plan.drafts:
            guessed |= enumerate(draft.guesses, start=place)
            place += len(draft.tokens)
        return guessed
