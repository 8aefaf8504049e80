"""Constraints of any kind that tests make, each asked by itself."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Protocol

import numpy as np

from nightmill.worker.engine.constraints import STUCK, Faults, NoGrammars, reason_of
from nightmill.worker.runners.base import IntArray


class Constraint(Protocol):
    """Follows one text. What it raises ends that text alone, with an error: a ConstraintError says which."""

    def mask(self, row: IntArray, /) -> None:
        """Set the bits of the tokens that may be next in a row of zeros, laid out as for `Runner.draw`.

        The tokens that end a text are among them where it may be over. None at all: the text is stuck.
        """
        ...

    def accept(self, token_id: int, /) -> None:
        """Go on by a token that was drawn; an earlier attempt's tokens come first, in their order."""
        ...


class OneByOne(NoGrammars):
    """Asks each constraint by itself; requests bring them made. `words`: of masks, where drafts are made."""

    def __init__(self, words: int = 1) -> None:
        self._words = words

    def masks(self, constraints: Mapping[int, Constraint], masks: IntArray, /) -> Faults:
        faults: Faults = {}
        for place, constraint in constraints.items():
            row = masks[place]
            row[:] = 0
            try:
                constraint.mask(row)
            except Exception as error:
                row[:] = 0
                faults[place] = reason_of(error)
            else:
                if not row.any():
                    faults[place] = STUCK
        return faults

    def accept(self, constraints: Sequence[Constraint], token_ids: Sequence[int], /) -> Faults:
        faults: Faults = {}
        for place, (constraint, token_id) in enumerate(zip(constraints, token_ids, strict=True)):
            try:
                constraint.accept(token_id)
            except Exception as error:
                faults[place] = reason_of(error)
        return faults

    def guess(self, constraint: Constraint, guesses: Sequence[int], most: int, /) -> Sequence[int]:
        copy, taken, given = deepcopy(constraint), list[int](), list(guesses)
        while len(taken) < most:
            row = np.zeros(self._words, dtype=np.int32)
            copy.mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            if given and given[0] in allowed:
                token = given.pop(0)
            elif len(allowed) == 1:
                token, given = allowed[0], []
            else:
                break
            copy.accept(token)
            taken.append(token)
        return taken

    def ahead(self, constraint: Constraint, token_ids: Sequence[int], /) -> Constraint | None:
        copy = deepcopy(constraint)
        try:
            for token_id in token_ids:
                copy.accept(token_id)
        except AssertionError:
            return None
        return copy
