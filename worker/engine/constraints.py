"""What a sequence may draw, where that is not everything: the seam for grammars, schemas and choices.

A constraint knows the tokens that were drawn and says which may be next. Its mask hangs on the last of them,
so a sequence that has one draws no further token until the host has seen that one; what it computes before
that needs no mask. Others run ahead.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nightmill.jobs.contract import Constrained
from nightmill.jobs.errors import ConstraintError
from nightmill.worker.runners.base import IntArray

log = logging.getLogger(__name__)

STUCK = "no token of this model can follow: what the answer has to obey allows none here"


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


Faults = dict[int, str]
"""Which of some constraints failed, by their places, and why."""


Begin = Callable[[], Any]
"""Makes the constraint of one text, at its beginning."""


class Constraints(Protocol):
    """Makes constraints, and asks those of a step all at once. Never raises for what one of them does."""

    def compile(self, asked: Constrained, /) -> Future[Begin]:
        """What texts of which this is asked begin with, made elsewhere than on this thread.

        It raises ConstraintError for what cannot be compiled, and RunnerError where that could not be found
        out, which is no text's fault.
        """
        ...

    def close(self) -> None:
        """End what is being compiled; safe to call twice."""
        ...

    def masks(self, constraints: Mapping[int, Any], masks: IntArray, /) -> Faults:
        """Write the mask of each at its place in what `Runner.draw` takes; other places are left alone.

        A row that leaves nothing to draw is a fault, too.
        """
        ...

    def accept(self, constraints: Sequence[Any], token_ids: Sequence[int], /) -> Faults:
        """Move each past the token that was drawn under it."""
        ...


class OneByOne:
    """For constraints of any kind, which others make."""

    def compile(self, asked: Constrained, /) -> Future[Begin]:
        """See Constraints."""
        refused: Future[Begin] = Future()
        refused.set_exception(ConstraintError(f"{asked.kind}: this engine compiles none"))
        return refused

    def close(self) -> None:
        """See Constraints."""

    def masks(self, constraints: Mapping[int, Any], masks: IntArray, /) -> Faults:
        """See Constraints."""
        faults: Faults = {}
        for place, constraint in constraints.items():
            row = masks[place]
            row[:] = 0
            try:
                constraint.mask(row)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends that text alone
                row[:] = 0
                faults[place] = reason_of(error)
            else:
                if not row.any():
                    faults[place] = STUCK
        return faults

    def accept(self, constraints: Sequence[Any], token_ids: Sequence[int], /) -> Faults:
        """See Constraints."""
        faults: Faults = {}
        for place, (constraint, token_id) in enumerate(zip(constraints, token_ids, strict=True)):
            try:
                constraint.accept(token_id)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends that text alone
                faults[place] = reason_of(error)
        return faults


def reason_of(error: Exception) -> str:
    """What the job whose constraint raised this is told; what nobody expected is logged, too."""
    if isinstance(error, ConstraintError):
        return str(error)
    log.error("a constraint failed", exc_info=error)
    return f"what the answer must be could not be followed: {type(error).__name__}: {error}"
