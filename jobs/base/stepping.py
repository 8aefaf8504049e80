"""Long work in small steps: a generator that can be suspended between steps and resumed."""

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Run all steps; returns the generator's return value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
