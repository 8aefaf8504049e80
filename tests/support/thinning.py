"""Many cases of one claim: `make test` tries some of them, `make test-all` every one."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(cases: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """Return the cases for `parametrize`: by default each `every`-th runs, from the one at `first` on.

    The others are `slow`. Tests that go through the same cases begin at different ones, so that each case is
    met by some of them.
    """
    chosen = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, Sequence) and not isinstance(case, str) else (case,)
        marks = () if number % every == first % every else (pytest.mark.slow,)
        chosen.append(pytest.param(*values, marks=marks))
    return chosen
