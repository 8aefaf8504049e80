"""A small model that guesses what a larger one draws: an engine of its own, on a runner of its own.

It is asked to go on with texts, each by the parameters and the seed of its row. Where both models find the
same tokens likely they draw the same one, since a draw hangs on seed and place alone. Pages of what it has
read are shared from one question to the next, so that it reads what is new, and at most a page again.
"""

from collections.abc import Sequence as Texts
from itertools import takewhile
from typing import Any

from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request, Sequence
from nightmill.worker.runners.base import Runner

__all__ = ["DraftModel"]

_WITHOUT_END: dict[str, Any] = {
    "ignore_eos": True, "stop": (), "stop_token_ids": (), "min_tokens": 0, "logprobs": None,
}  # fmt: skip
"""The parameters of a row that do not say which token is drawn."""


class DraftModel:
    """Guesses by a runner, which it owns.

    context  tokens of the longest text that it is asked to go on with; others have no guesses
    tokens   those below this are the same in both vocabularies; None: all are
    """

    def __init__(self, runner: Runner, *, context: int, token_budget: int, tokens: int | None = None) -> None:
        text = Detokenizer(text_stream=_NoText, eos_ids=frozenset(), decode=lambda token_ids: "")
        self._engine = Engine(runner, text, EngineSizes(context, runner.slots, token_budget))
        self._asked = 0
        self._tokens = runner.vocab if tokens is None else min(tokens, runner.vocab)

    def guess(self, sequences: Texts[Sequence], most: int) -> list[tuple[int, ...]]:
        """At most so many guesses at what each of these texts goes on with. Raises RunnerError."""
        requests = [self._request(one, most) if max(one.tokens) < self._tokens else None for one in sequences]
        for request in filter(None, requests):
            self._engine.submit(request)
        done: dict[str, Completion] = {}
        while self._engine.has_work:
            done |= {one.job_id: one for one in self._engine.step()}
        return [() if one is None else self._known(done[one.job_id].token_ids) for one in requests]

    def _known(self, guesses: tuple[int, ...]) -> tuple[int, ...]:
        """The guesses before the first that the other model does not have."""
        return tuple(takewhile(lambda token: token < self._tokens, guesses))

    def close(self) -> None:
        """Release the runner; safe to call twice."""
        self._engine.close()

    def _request(self, sequence: Sequence, most: int) -> Request:
        self._asked += 1
        params = sequence.request.params.model_copy(update={"max_tokens": most, **_WITHOUT_END})
        return Request(str(self._asked), 1, tuple(sequence.tokens), params, sequence.request.seed)


class _NoText:
    """A stream for who looks at tokens only."""

    whole = True

    def push(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""
