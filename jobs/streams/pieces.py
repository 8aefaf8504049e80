"""Pieces of a growing text, and their positions. No I/O here.

A position is a number of characters and a checksum of the text before it. So a reader can resume at a
position from any source: another worker, a later attempt, the row. If the text before the position has
changed, the checksum shows it, which is an error.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Self

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.errors import InvalidParameterError, StreamChangedError
from nightmill.jobs.reply.logprobs import TokenLogprob

_PLACE = re.compile(r"(\d{1,10})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class TextPosition:
    """A position after the first `characters` of a text, whose CRC-32 (of the UTF-8 bytes) is `check`."""

    characters: int = 0
    check: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of `str`; raises InvalidParameterError."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise InvalidParameterError(
                "after: must be the place of a piece, as 42-1c291ca3; leave it out to begin at the beginning",
                field="after",
            )
        return cls(int(found[1]), int(found[2], 16))

    def past(self, text: str) -> Self:
        """Return the position after `text`, which follows this one."""
        return type(self)(self.characters + len(text), zlib.crc32(text.encode(), self.check))

    def __str__(self) -> str:
        return f"{self.characters}-{self.check:08x}"


START = TextPosition()


class Piece(str):
    """A piece of a text: a str with `place`, the position of its end.

    markup  markup of reasoning and tool calls in the text, if any
    tokens  log-probabilities of the tokens since the last piece, if the reader wants them; the row has those
            that came with no piece
    counts  numbers of prompt tokens and of tokens generated so far, if the reader wants them
    """

    __slots__ = ("counts", "markup", "place", "tokens")
    counts: tuple[int, int] | None
    place: TextPosition
    markup: Markup | None
    tokens: tuple[TokenLogprob, ...]

    def __new__(
        cls,
        text: str,
        place: TextPosition,
        markup: Markup | None = None,
        tokens: tuple[TokenLogprob, ...] = (),
        counts: tuple[int, int] | None = None,
    ) -> Self:
        """Make a piece; `place` is the position after `text`."""
        piece = super().__new__(cls, text)
        piece.place = place
        piece.markup = markup
        piece.tokens = tokens
        piece.counts = counts
        return piece

    @property
    def start(self) -> int:
        """Number of characters before the piece."""
        return self.place.characters - len(self)


class Cursor:
    """The progress of a reader through a text whose pieces may repeat, have gaps, and come from several
    sources.

    Each source sends the text from its beginning. When another source takes over, the part that was read
    already is compared and skipped.
    """

    def __init__(self, place: TextPosition = START) -> None:
        self.place = place
        self._source = START  # progress of the current source

    def restart(self) -> None:
        """Expect the first piece of a source next."""
        self._source = START

    def read(self, start: int, text: str) -> Piece | None:
        """Return the new part of a piece that begins at character `start`.

        Raises GapError if earlier pieces are missing, StreamChangedError if the text differs from the one
        read so far.
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
        """Return the rest of the whole text; raises StreamChangedError."""
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
    """Pieces before this one are missing."""
