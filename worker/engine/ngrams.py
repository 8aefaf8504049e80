"""Finds where a text's last tokens stood together before, and so what may follow them."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

__all__ = ["Guesses", "Ngrams"]

LONGEST, SHORTEST = 4, 3
"""Tokens in a row that have to be found again: the most of these that are."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 128
"""Tokens without a guess after guesses of which none was right; twice as many after each further time."""


class Ngrams:
    """The places where runs of tokens ended last in a text, which grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = SHORTEST

    def guess(self, tokens: list[int], most: int) -> Tokens[int]:
        """The `most` tokens that followed the text's end when it last stood there; reads what is new.

        Where the text ends before that they go on with the first of themselves. None if it never stood there.
        """
        # The runs that end with the last token are not entered yet: they would find themselves.
        for end in range(self._read, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._read = max(self._read, len(tokens))
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-length:]), 0)
            if end:
                guesses = tokens[end : end + most]
                while guesses and len(guesses) < most:
                    guesses.append(guesses[len(guesses) - (len(tokens) - end)])
                return guesses
        return ()


@dataclass(slots=True)
class Guesses:
    """A text's guesses at its next tokens, and whether it pays to make any."""

    ngrams: Ngrams = field(default_factory=Ngrams)
    pause: int = FIRST_PAUSE
    again_from: int = 0
    """No guess before the text has so many tokens."""

    def at(self, tokens: list[int], most: int) -> Tokens[int]:
        """At most so many guesses; none while it pauses."""
        return () if len(tokens) < self.again_from else self.ngrams.guess(tokens, most)

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Note that of so many guesses so many were right, in a text of `length` tokens by now."""
        if right:
            self.pause = FIRST_PAUSE
        elif guessed:
            self.again_from = length + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
