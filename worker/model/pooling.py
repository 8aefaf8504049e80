"""Which hidden states of a text become its embedding."""

from enum import StrEnum
from typing import Final

from nightmill.worker.model.gguf.file import GgufFile

__all__ = ["Pooling", "pooling_of", "ranks_pairs"]


class Pooling(StrEnum):
    """The states behind the last norm that are averaged.

    last  that of the last token
    mean  those of all tokens
    cls   that of the first token, of encoders, where it sees all others
    """

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"

    def places(self, tokens: int) -> range:
        """The places of the states, in a text of so many tokens."""
        if self is Pooling.CLS:
            return range(1)
        return range(0 if self is Pooling.MEAN else tokens - 1, tokens)


_BY_NUMBER: Final = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_RANK: Final = 4  # one number of a pair of texts, by a head of its own
_NO_EMBEDDINGS: Final = (-1, 0, _RANK)  # not said; each token's own


def pooling_of(file: GgufFile, family: str, *, encodes: bool = False) -> Pooling | None:
    """The pooling that a file's `pooling_type` names, in llama.cpp's numbers; None if it makes no embeddings.

    Raises ModelFileError for a number that nobody has given a meaning.
    """
    name = f"{family}.pooling_type"
    number = file.integer(name, minimum=-1, default=0)
    if number not in _BY_NUMBER and number not in _NO_EMBEDDINGS:
        file.fail(f"{name}: is {number}, expected 0 to 4")
    pooling = _BY_NUMBER.get(number)
    # A decoder's first token sees no other.
    return None if pooling is Pooling.CLS and not encodes else pooling


def ranks_pairs(file: GgufFile, family: str) -> bool:
    """Return whether a file is of a cross-encoder, whose `pooling_type` says that it ranks pairs of texts."""
    return file.integer(f"{family}.pooling_type", minimum=-1, default=0) == _RANK
