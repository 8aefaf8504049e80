"""Rows in groups of so many, or so much text: what is held at once and written at once has a bound."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

ROWS_PER_TRANSACTION = 1024
CHARACTERS_PER_TRANSACTION = 8 * 2**20
_DEPTH = 8  # a prompt, or messages with parts: what lies deeper is not weighed
_CHARACTERS_OF_A_NUMBER = 6

T = TypeVar("T")


def grouped(rows: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of rows: each ends with the row that reaches one of the bounds. `size_of` gives characters."""
    group: list[T] = []
    size = 0
    for row in rows:
        group.append(row)
        size += size_of(row)
        if len(group) >= ROWS_PER_TRANSACTION or size >= CHARACTERS_PER_TRANSACTION:
            yield group
            group, size = [], 0
    if group:
        yield group


def characters(value: object, depth: int = _DEPTH) -> int:
    """How many characters of text a prompt holds, or an item with a prompt and settings of its own.

    A number counts as six: of token ids a prompt may have as many as it likes.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return _CHARACTERS_OF_A_NUMBER
    if depth == 0:
        return 0
    if isinstance(value, Mapping):
        return sum(characters(part, depth - 1) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(characters(part, depth - 1) for part in value)
    return 0
