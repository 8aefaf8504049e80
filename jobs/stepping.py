"""Long work in small steps: a generator that yields between two of them can be put aside and resumed."""

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Take all steps at once; returns what the generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
