"""Rows in groups of so many, or so much text: what is held at once and written at once has a bound."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

ROWS_PER_TRANSACTION = 1024
CHARACTERS_PER_TRANSACTION = 8 * 2**20
_DEPTH = 8  # a prompt, or messages with parts: what lies deeper is not weighed
_CHARACTERS_OF_A_NUMBER = 6

T = TypeVar("T")


class Group(Generic[T]):
    """Rows that are to be written at once. It is full with the row that reaches one of the bounds."""

    def __init__(self) -> None:
        self.rows: list[T] = []
        self._size = 0

    def add(self, row: T, size: int) -> bool:
        """Take a row of `size` characters in; returns whether the group is full."""
        self.rows.append(row)
        self._size += size
        return len(self.rows) >= ROWS_PER_TRANSACTION or self._size >= CHARACTERS_PER_TRANSACTION


def grouped(rows: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of rows: each ends with the row that reaches one of the bounds. `size_of` gives characters."""
    group: Group[T] = Group()
    for row in rows:
        if group.add(row, size_of(row)):
            yield group.rows
            group = Group()
    if group.rows:
        yield group.rows


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
