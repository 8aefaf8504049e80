"""Finds where a text's last tokens stood together before, in it or in its like, and so what may follow."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

__all__ = ["Guesses", "Habits", "Ngrams"]

LONGEST, SHORTEST = 4, 3
"""Tokens in a row that have to be found again: the most of these that are."""
MOST_RUNS = 1 << 16
"""Runs that `Habits` keep: some 15 MB."""
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


class Habits:
    """The tokens that followed runs of others in texts that are alike, as answers under one schema are.

    A token is guessed where it followed the same run twice, one time after the other: so guesses end where
    texts differ.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], tuple[int, bool]] = {}  # what followed last, and the time before

    def read(self, tokens: list[int], first: int) -> None:
        """Read a text's tokens from a place on."""
        if len(self._next) > MOST_RUNS:
            self._next.clear()
        for place in range(max(first, LONGEST), len(tokens)):
            run, token = tuple(tokens[place - LONGEST : place]), tokens[place]
            known = self._next.get(run)
            self._next[run] = token, known is not None and known[0] == token

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that always follow such an end."""
        run, guesses = tuple(tokens[-LONGEST:]), list[int]()
        while len(guesses) < most:
            token, sure = self._next.get(run, (0, False))
            if not sure:
                break
            guesses.append(token)
            run = (*run[1:], token)
        return guesses


@dataclass(slots=True)
class Guesses:
    """A text's guesses at its next tokens, and whether it pays to make any."""

    ngrams: Ngrams = field(default_factory=Ngrams)
    pause: int = FIRST_PAUSE
    again_from: int = 0
    """No guess of its own before the text has so many tokens."""
    read: int = 0
    """Tokens that the habits of its like were told of."""
    followed: tuple[int, tuple[int, ...]] = (0, ())
    """The tokens of the text when it was last asked, and what may follow under its constraint."""
    own: bool = True
    """The last guesses were of its own words."""

    def at(self, tokens: list[int], most: int, habits: Habits | None = None) -> Tokens[int]:
        """At most so many guesses, by the habits of its like or, unless it pauses, by its own words."""
        if habits is not None:
            habits.read(tokens, self.read)
            self.read = len(tokens)
            if guesses := habits.guess(tokens, most):
                self.own = False
                return guesses
        if len(tokens) < self.again_from:
            return ()
        self.own = True
        return self.ngrams.guess(tokens, most)

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Note that of so many guesses so many were right, in a text of `length` tokens by now."""
        if not self.own:
            return
        if right:
            self.pause = FIRST_PAUSE
        elif guessed:
            self.again_from = length + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
