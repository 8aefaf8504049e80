"""Embeddings as rows keep them: float32, the lowest byte first."""

import base64
import math
import sys
from array import array

__all__ = ["Embedding", "encoded", "numbers", "relevance_of", "written"]

Embedding = tuple[float, ...]


def numbers(data: bytes) -> Embedding:
    """The numbers of an embedding, exactly."""
    return tuple(_floats(data))


def written(data: bytes) -> list[float]:
    """The numbers with nine digits: those of a text, of which float32 makes the same bits again."""
    return [float(format(number, ".9g")) for number in _floats(data)]


def encoded(data: bytes) -> str:
    """The bytes in base64, as OpenAI's API has them."""
    return base64.b64encode(data).decode()


def relevance_of(data: bytes) -> float:
    """Return the relevance of a document, 0 to 1, of the logit that is kept of it."""
    (logit,) = _floats(data)
    return 1 / (1 + math.exp(-max(-700.0, logit)))


def _floats(data: bytes) -> "array[float]":
    made = array("f")
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    return made
