"""The seam for grammars, schemas and choices, which restrict the tokens that a sequence may draw.

A constraint knows the tokens that were drawn and says which may be next. Its mask hangs on the last of them,
so a sequence that has one draws no further token until the host has seen that one; what it computes before
that needs no mask. Others run ahead.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nightmill.jobs.base.contract import Constrained
from nightmill.jobs.errors import ConstraintError
from nightmill.worker.runners.base import IntArray

log = logging.getLogger(__name__)

STUCK = "no token of this model can follow: what the answer has to obey allows none here"


def nothing_left(*fields: str) -> str:
    """The fault of a text to which these fields of its row leave no token that its constraint allows."""
    return (
        f"no token is left to go on with: {' and '.join(fields)} of the row rule out all that its answer may "
        "have here (choice, a schema, a grammar or calls of tools say what that is). Loosen one of them"
    )


_NONE_HERE = "this engine compiles none"

Faults = dict[int, str]
"""Which of some constraints failed, by their places, and why."""


MatcherFactory = Callable[[], Any]
"""Makes the constraint of one text, at its beginning."""


class GrammarBackend(Protocol):
    """Makes constraints, and asks those of a step all at once. Never raises for what one of them does."""

    def compile(self, asked: Constrained, /) -> Future[MatcherFactory]:
        """Compile the constraint on another thread; the future gives a factory for matchers.

        The future raises ConstraintError if the constraint cannot be compiled, and RunnerError if that could
        not be found out, which is no text's fault.
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

    def guess(self, constraint: Any, guesses: Sequence[int], most: int, /) -> Sequence[int]:
        """Return the guesses up to the first that may not follow, then what else has to; at most so many.

        What must follow is text: a model may spell it with other tokens. The constraint stays where it is.
        """
        ...

    def ahead(self, constraint: Any, token_ids: Sequence[int], /) -> Any | None:
        """A copy that has accepted these tokens; None if it did not accept one of them."""
        ...


class NoGrammars:
    """The constraints of an engine that has no grammars: each is refused."""

    def compile(self, asked: Constrained, /) -> Future[MatcherFactory]:
        """See GrammarBackend."""
        refused: Future[MatcherFactory] = Future()
        refused.set_exception(ConstraintError(f"{asked.kind}: {_NONE_HERE}"))
        return refused

    def close(self) -> None:
        """See GrammarBackend."""

    def masks(self, constraints: Mapping[int, Any], masks: IntArray, /) -> Faults:
        """See GrammarBackend."""
        return dict.fromkeys(constraints, _NONE_HERE)

    def accept(self, constraints: Sequence[Any], token_ids: Sequence[int], /) -> Faults:
        """See GrammarBackend."""
        return dict.fromkeys(range(len(constraints)), _NONE_HERE)

    def guess(self, constraint: Any, guesses: Sequence[int], most: int, /) -> Sequence[int]:
        """See GrammarBackend."""
        return ()

    def ahead(self, constraint: Any, token_ids: Sequence[int], /) -> Any | None:
        """See GrammarBackend."""
        return None


def reason_of(error: Exception) -> str:
    """Return the message for the job whose constraint raised `error`; log it, too, if nobody expected it."""
    if isinstance(error, ConstraintError):
        return str(error)
    log.error("a constraint failed", exc_info=error)
    return f"what the answer must be could not be followed: {type(error).__name__}: {error}"
