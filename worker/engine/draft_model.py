"""A small model that guesses what a larger one draws: an engine of its own, on a runner of its own.

It is asked to go on with texts, each by the parameters and the seed of its row. Where both models find the
same tokens likely they draw the same one, since a draw hangs on seed and place alone. Pages of what it has
read are shared from one question to the next, so that it reads what is new, and at most a page again.
"""

from collections.abc import Sequence as Texts

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request, Sequence
from nightmill.worker.runners.base import Runner

__all__ = ["DraftModel"]


class DraftModel:
    """Guesses by a runner, which it owns.

    context  tokens of the longest text that it is asked to go on with; others have no guesses
    """

    def __init__(self, runner: Runner, *, context: int, token_budget: int) -> None:
        text = Detokenizer(text_stream=_NoText, eos_ids=frozenset(), decode=lambda token_ids: "")
        self._engine = Engine(runner, text, EngineSizes(context, runner.slots, token_budget))
        self._asked = 0

    def guess(self, sequences: Texts[Sequence], most: int) -> list[tuple[int, ...]]:
        """At most so many guesses at what each of these texts goes on with. Raises RunnerError."""
        requests = [self._request(sequence, most) for sequence in sequences]
        for request in requests:
            self._engine.submit(request)
        done: dict[str, Completion] = {}
        while self._engine.has_work:
            done |= {one.job_id: one for one in self._engine.step()}
        return [done[request.job_id].token_ids for request in requests]

    def close(self) -> None:
        """Release the runner; safe to call twice."""
        self._engine.close()

    def _request(self, sequence: Sequence, most: int) -> Request:
        self._asked += 1
        params, seed = sequence.request.params, sequence.request.seed
        drawn = GenerationParams(
            max_tokens=most,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            ignore_eos=True,
        )
        return Request(str(self._asked), 1, tuple(sequence.tokens), drawn, seed)


class _NoText:
    """A stream for who looks at tokens only."""

    whole = True

    def push(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""
