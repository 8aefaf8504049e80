"""Says why a request can never run on this worker, in words that help."""

from dataclasses import dataclass

from worker.engine.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: token ids below `vocab`, a context, and a KV cache of pages."""

    vocab: int
    context: int  # most tokens of a sequence, by the worker's settings
    pages: int
    page_tokens: int

    @property
    def tokens(self) -> int:
        """The most tokens of a sequence: the context, or the whole KV cache where that is less."""
        return min(self.context, self.pages * self.page_tokens)

    def fault(self, request: Request) -> str | None:
        """Why a request can never run, with the remedy; None where it can."""
        prompt = request.prompt_ids
        if not prompt:
            return "the prompt has no tokens: give it some text"
        if (lowest := min(prompt)) < 0 or (highest := max(prompt)) >= self.vocab:
            wrong = lowest if lowest < 0 else highest
            return (
                f"the prompt holds token id {wrong}, but this model's ids go from 0 to {self.vocab - 1}: "
                "tokenize it with this model's own vocabulary"
            )
        if not all(0 <= token < self.vocab for token in request.generated_ids):
            return (
                "the answer begun by an earlier attempt holds token ids that this model lacks: retry the job"
            )
        if len(prompt) < self.tokens:
            return None
        if len(prompt) >= self.context:
            return (
                f"the prompt has {len(prompt)} tokens; this worker's context holds {self.context}, of which "
                "at least one must be left for the answer: shorten it or start the worker with "
                f"--context {len(prompt) + request.params.max_tokens}, if the model allows it"
            )
        return (
            f"the prompt has {len(prompt)} tokens; this worker's KV cache holds {self.tokens} "
            f"({self.pages} pages of {self.page_tokens}), of which at least one must be left for "
            "the answer: shorten it or give the worker more memory for its KV cache"
        )
