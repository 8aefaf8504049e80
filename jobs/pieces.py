"""Pieces of a text that is being generated, and the place where each ends. No I/O here.

A place is a number of characters and a check of the text before it. So whoever comes back with a place goes
on exactly there, wherever the text comes from by then: another worker, a later attempt, the row. If the text
before the place is another by then, that is seen, and an error.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Self

from nightmill.jobs.contract import Markup
from nightmill.jobs.errors import InvalidParameterError, StreamChangedError
from nightmill.jobs.logprobs import TokenLogprob

_PLACE = re.compile(r"(\d{1,10})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class Place:
    """After the first `characters` of a text, whose CRC-32 (of their UTF-8) is `check`."""

    characters: int = 0
    check: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` of a place gave; raises InvalidParameterError."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise InvalidParameterError(
                "after: must be the place of a piece, as 42-1c291ca3; leave it out to begin at the beginning",
                field="after",
            )
        return cls(int(found[1]), int(found[2], 16))

    def past(self, text: str) -> Self:
        """The place after `text`, which follows on this one."""
        return type(self)(self.characters + len(text), zlib.crc32(text.encode(), self.check))

    def __str__(self) -> str:
        return f"{self.characters}-{self.check:08x}"


START = Place()


class Piece(str):
    """A piece of a text: a str, with the `place` where it ends.

    markup  what the text holds beside the answer; None: nothing
    tokens  log-probabilities of tokens up to its end, but for those of pieces before, if its reader wants
            them; what has not come with any piece is in the row
    """

    __slots__ = ("markup", "place", "tokens")
    place: Place
    markup: Markup | None
    tokens: tuple[TokenLogprob, ...]

    def __new__(
        cls,
        text: str,
        place: Place,
        markup: Markup | None = None,
        tokens: tuple[TokenLogprob, ...] = (),
    ) -> Self:
        """`place` is that after `text`."""
        made = super().__new__(cls, text)
        made.place = place
        made.markup = markup
        made.tokens = tokens
        return made

    @property
    def start(self) -> int:
        """Characters of the text before it."""
        return self.place.characters - len(self)


class Cursor:
    """How far a reader has come in a text, whose pieces may come twice, with gaps, and from several sources.

    A source gives the text from its beginning. Who takes over from another begins again there: what has been
    read already is compared, and left out.
    """

    def __init__(self, place: Place = START) -> None:
        self.place = place
        self._source = START  # how far the present source has come

    def restart(self) -> None:
        """The next piece is the first of a source."""
        self._source = START

    def read(self, start: int, text: str) -> Piece | None:
        """What is new of a piece that begins at character `start`.

        Raises GapError if pieces before it are missing, StreamChangedError if the text is not the one that
        was read so far.
        """
        if start == 0:
            self.restart()
        if start != self._source.characters:
            raise GapError
        known = max(0, min(len(text), self.place.characters - start))
        self._source = self._source.past(text[:known])
        if known and self._source.characters == self.place.characters:
            self._compare()
        return self._advance(text[known:])

    def finish(self, text: str) -> Piece | None:
        """What is missing at the end, of the whole text; raises StreamChangedError."""
        self._source = START.past(text[: self.place.characters])
        self._compare()
        return self._advance(text[self.place.characters :])

    def _advance(self, fresh: str) -> Piece | None:
        if not fresh:
            return None
        self.place = self._source = self.place.past(fresh)
        return Piece(fresh, self.place)

    def _compare(self) -> None:
        if self._source != self.place:
            raise StreamChangedError


class GapError(Exception):
    """Pieces are missing before this one."""
