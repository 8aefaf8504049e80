"""Log-probabilities of tokens: as public types, and packed as rows store them.

Readers of a row have no tokenizer, so the packed form contains the spelling of each distinct token. All
numbers have 4 bytes, little-endian:

    head        version 1, likely tokens N with each, tokens T, different tokens D
    spellings   D ids, D lengths, then the bytes. A negative length is that of a control token's name
    tokens      T indices of spellings
    own         T floats: their log-probabilities; NaN for the first token of a text
    likely      T * N indices of spellings, the likeliest first; -1 after the last
    theirs      T * N floats: the log-probabilities of the likely tokens

With 5 likely tokens this takes 48 bytes a token, and 30 more for each distinct one.
"""

import codecs
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

_VERSION = 1
_HEAD = 4  # numbers
LEAST = -9999.0
"""The lowest reported log-probability, as JSON has no infinity; OpenAI's API has the same bound."""


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A candidate for the next token."""

    token: str  # its text, with U+FFFD for incomplete characters; the name of a control token
    logprob: float
    bytes: bytes  # its bytes in the text; empty for a control token
    id: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text."""

    token: str
    logprob: float | None  # None for the first token of a text
    bytes: bytes
    id: int
    offset: int  # characters of the text before it
    top: tuple[LikelyToken, ...] = ()  # the likeliest candidates, in order


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probability of a text after a prompt."""

    text: str
    logprob: float  # sum over its tokens
    tokens: tuple[TokenLogprob, ...]


class Scores(tuple[Score, ...]):
    """The scores of several texts after one prompt, in the order of the texts."""

    __slots__ = ()

    @property
    def best(self) -> Score:
        """The likeliest text; the first of equals."""
        return max(self, key=lambda score: score.logprob)


class Packed(NamedTuple):
    """Packed tokens of a growing text, from token number `first` on.

    offsets  of each token, in characters of the whole text
    data     the result of `pack`
    """

    first: int
    offsets: tuple[int, ...]
    data: bytes

    def tokens(self) -> tuple["TokenLogprob", ...]:
        """Unpack the tokens; empty if the data is invalid."""
        found = read(self.data) or ()
        if len(found) != len(self.offsets):
            return ()
        pairs = zip(found, self.offsets, strict=True)
        return tuple(replace(token, offset=offset) for token, offset in pairs)


Spell = Callable[[int], tuple[bytes, str]]
"""Maps a token id to its bytes in a text, and to its name, which is shown if there are none."""


def offsets(pieces: Sequence[bytes]) -> list[int]:
    """Return the offset of each piece in the decoded text, in characters."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    return [0, *accumulate(len(decode(piece)) for piece in pieces)][: len(pieces)]


def pack(token_ids: Sequence[int], records: bytes, likely: int, spell: Spell) -> bytes:
    """Pack tokens into the form that a row stores.

    records  1 + 2 * likely numbers for each token, in the layout of `worker.engine.told`
    """
    count, width = len(token_ids), 1 + 2 * likely
    floats, whole = array("f", records), array("i", records)
    own = array("f", (floats[place * width] for place in range(count)))
    ids, theirs = array("i"), array("f")
    for place in range(count):
        first = place * width + 1
        ids += whole[first : first + likely]
        theirs += floats[first + likely : first + 2 * likely]
    numbers: dict[int, int] = {}
    for token_id in (*token_ids, *ids):
        if token_id >= 0:
            numbers.setdefault(token_id, len(numbers))
    spellings = [spell(token_id) for token_id in numbers]
    lengths = array("i", (len(text) or -len(name.encode()) for text, name in spellings))
    numbers[-1] = -1
    parts = (
        array("i", (_VERSION, likely, count, len(spellings))),
        array("i", list(numbers)[:-1]),
        lengths,
        b"".join(text or name.encode() for text, name in spellings),
        array("i", (numbers[token_id] for token_id in token_ids)),
        own,
        array("i", (numbers[max(token_id, -1)] for token_id in ids)),
        theirs,
    )
    return b"".join(part if isinstance(part, bytes) else _little(part).tobytes() for part in parts)


def read(data: bytes) -> tuple[TokenLogprob, ...] | None:
    """Unpack the result of `pack`; None if the data is invalid, for example written by a newer version."""
    try:
        return tuple(_tokens(data))
    except (ValueError, IndexError):
        return None


def total(tokens: Sequence[TokenLogprob]) -> float:
    """Return the sum of the tokens' log-probabilities."""
    return math.fsum(token.logprob for token in tokens if token.logprob is not None)


def _tokens(data: bytes) -> Iterator[TokenLogprob]:
    place = 0

    def take(kind: str, count: int) -> array:  # type: ignore[type-arg]
        nonlocal place
        end = place + 4 * count
        if count < 0 or end > len(data):
            raise ValueError("the data ends too early")
        found = array(kind, data[place:end])
        place = end
        return _little(found)

    version, likely, count, different = take("i", _HEAD)
    if version != _VERSION:
        raise ValueError("written by another version")
    token_ids, lengths = take("i", different), take("i", different)
    ends = [place, *accumulate(map(abs, lengths), initial=place)][1:]
    spelt = [data[start:end] for start, end in pairwise(ends)]
    place = ends[-1]
    texts = [text.decode(errors="replace") for text in spelt]
    pieces = [text if length > 0 else b"" for text, length in zip(spelt, lengths, strict=True)]
    tokens, own = take("i", count), take("f", count)
    ids, theirs = take("i", count * likely), take("f", count * likely)
    starts = offsets([pieces[number] for number in tokens])
    for index, number in enumerate(tokens):
        span = slice(index * likely, (index + 1) * likely)
        top = tuple(
            LikelyToken(texts[other], max(logprob, LEAST), pieces[other], token_ids[other])
            for other, logprob in zip(ids[span], theirs[span], strict=True)
            if other >= 0
        )
        logprob = None if math.isnan(own[index]) else max(own[index], LEAST)
        yield TokenLogprob(texts[number], logprob, pieces[number], token_ids[number], starts[index], top)


def _little(numbers: array) -> array:  # type: ignore[type-arg]
    """Convert between native byte order and that of rows."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
