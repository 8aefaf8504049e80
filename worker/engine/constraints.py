"""What a sequence may draw, where that is not everything: the seam for grammars, schemas and choices.

A constraint knows the tokens that were drawn and says which may be next. Its mask hangs on the last of them,
so a sequence that has one draws no further token until the host has seen that one. Others run ahead.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from nightmill.worker.runners.base import IntArray, mask_words


class Constraint(Protocol):
    """Follows one text. An exception out of it ends the engine: what it is made from is checked before."""

    def mask(self, row: IntArray, /) -> None:
        """Set the bits of the tokens that may be next in a row of zeros, laid out as for `Runner.draw`.

        The tokens that end a text are among them where it may be over. None at all: the text is stuck.
        """
        ...

    def accept(self, token_id: int, /) -> None:
        """Go on by a token that was drawn; an earlier attempt's tokens come first, in their order."""
        ...


def make_masks(constraints: Iterable[Constraint], vocab: int) -> IntArray:
    """What `Runner.draw` takes: the masks of these constraints, in their order."""
    constraints = list(constraints)
    masks = np.zeros((len(constraints), mask_words(vocab)), dtype=np.int32)
    for constraint, row in zip(constraints, masks, strict=True):
        constraint.mask(row)
    return masks
