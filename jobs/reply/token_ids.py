"""The token ids of a job that asked for them, as its row keeps them.

Numbers of 4 bytes, the lowest first: a list's length and then its items, for the prompt and each answer.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple


class TokenIds(NamedTuple):
    """The token ids of a prompt and of its answers, with the tokens that ended these."""

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


def pack(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> bytes:
    """Pack the token ids of a prompt and its answers into the bytes that a row keeps."""
    numbers = array("i", chain.from_iterable((len(ids), *ids) for ids in (prompt, *answers)))
    return _little(numbers).tobytes()


def read(data: bytes) -> TokenIds | None:
    """Unpack the bytes that `pack` made; None if they are not such."""
    numbers = array("i")
    try:
        numbers.frombytes(data)
    except ValueError:
        return None
    numbers = _little(numbers)
    lists: list[tuple[int, ...]] = []
    place = 0
    while place < len(numbers):
        end = place + 1 + numbers[place]
        if not place < end <= len(numbers):
            return None
        lists.append(tuple(numbers[place + 1 : end]))
        place = end
    return TokenIds(lists[0], tuple(lists[1:])) if lists else None


def _little(numbers: array) -> array:  # type: ignore[type-arg]
    """In the byte order of rows, or back."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
