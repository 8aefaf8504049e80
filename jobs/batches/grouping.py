"""Groups of rows, bounded in number and in characters, for transactions of bounded size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

ROWS_PER_TRANSACTION = 1024
CHARACTERS_PER_TRANSACTION = 8 * 2**20
_DEPTH = 8  # deep enough for messages with parts; deeper texts are not counted
_CHARACTERS_OF_A_NUMBER = 6

T = TypeVar("T")


class RowGroup(Generic[T]):
    """Rows of one transaction. The row that reaches a bound is the last one."""

    def __init__(self) -> None:
        self.rows: list[T] = []
        self._size = 0

    def add(self, row: T, size: int) -> bool:
        """Take a row of `size` characters in; returns whether the group is full."""
        self.rows.append(row)
        self._size += size
        return len(self.rows) >= ROWS_PER_TRANSACTION or self._size >= CHARACTERS_PER_TRANSACTION


def grouped(rows: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split rows into lists; the row that reaches a bound ends its list. `size_of` returns characters."""
    group: RowGroup[T] = RowGroup()
    for row in rows:
        if group.add(row, size_of(row)):
            yield group.rows
            group = RowGroup()
    if group.rows:
        yield group.rows


def characters(value: object, depth: int = _DEPTH) -> int:
    """Count the characters of a prompt, or of an item with a prompt and settings.

    A number counts as six characters, since a prompt may have any number of token ids.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return _CHARACTERS_OF_A_NUMBER
    if depth == 0:
        return 0
    if isinstance(value, dict | Mapping):  # the first is known at once
        parts: Iterable[object] = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 0
    count = 0
    for part in parts:  # texts, most of them, which need no call of their own
        count += len(part) if type(part) is str else characters(part, depth - 1)
    return count
