"""Limits that a request must fit into to be run at all, and their faults in the words that its user reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from nightmill.jobs.base.contract import PAST_CONTEXT
from nightmill.jobs.request.parameters import GenerationParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine on requests, or (without `pages`) of an engine that is not built yet."""

    vocab: int
    context: int
    """Most tokens a sequence may have, prompt included."""
    page_size: int
    pages: int | None = None
    """Pages of the KV cache."""
    model_context: int | None = None
    """Most tokens that the model was made for, where that is known: more cannot be advised."""
    cache_tokens: int | None = None
    """Most tokens of a sequence for which the cache has pages; None: `pages` of `page_size`."""

    @property
    def cache_context(self) -> int:
        """Most tokens a sequence can have: fewer than `context` where the KV cache is smaller."""
        if self.pages is None:
            return self.context
        room = self.pages * self.page_size if self.cache_tokens is None else self.cache_tokens
        return min(self.context, room)

    def unknown_id(self, prompt: Sequence[int], params: GenerationParams) -> tuple[str, str] | None:
        """Which field holds a token id that the model lacks, and the fault in words; None where none does."""
        lowest, highest = min(prompt, default=0), max(prompt, default=0)
        if lowest < 0 or highest >= self.vocab:
            wrong = lowest if lowest < 0 else highest
            return "prompt", (
                f"the prompt holds token id {wrong}, but this model's ids go from 0 to {self.vocab - 1}: "
                "tokenize it with this model's own vocabulary"
            )
        if (highest := max(params.stop_token_ids, default=0)) >= self.vocab:
            return "stop_token_ids", (
                f"stop_token_ids: holds {highest}, but this model's ids go from 0 to {self.vocab - 1}: take "
                "them from this model's own vocabulary"
            )
        if (highest := max(params.logit_bias, default=0)) >= self.vocab:
            return "logit_bias", (
                f"logit_bias: holds {highest}, but this model's ids go from 0 to {self.vocab - 1}: take "
                "them from this model's own vocabulary"
            )
        return None

    def fault(
        self,
        prompt: Sequence[int],
        params: GenerationParams,
        begun: Sequence[int] = (),
        *,
        draws: bool = True,
    ) -> str | None:
        """Why a prompt of these token ids can never run, with the remedy; None where it can.

        begun: the tokens that an earlier attempt has drawn
        draws: an answer follows; without, as behind a text to score or in one to embed, the prompt may fill
            the context
        """
        if not prompt:
            return "the prompt has no tokens: give it some text"
        if (unknown := self.unknown_id(prompt, params)) is not None:
            return unknown[1]
        if not all(0 <= token < self.vocab for token in begun):
            return (
                "the answer that an earlier attempt began has token ids that this model lacks: retry the job"
            )
        if len(prompt) + draws <= self.cache_context:
            return None
        what, left = "the prompt has", ", of which at least one must be left for the answer"
        if params.rerank is not None:
            what, left = "the query and the document have", ""
        elif params.embed:
            what, left = "the text to embed has", ""
        elif not draws:
            what, left = "the prompt, with what is scored behind it, has", ""
        said = f"{what} {len(prompt)} tokens, which {PAST_CONTEXT}: this worker's"
        if len(prompt) + draws > self.context:
            advice = self._longer(len(prompt), params.max_tokens if draws else 0)
            return f"{said} context holds {self.context}{left}: shorten it{advice}"
        return (
            f"{said} KV cache holds {self.cache_context} ({self.pages} pages of {self.page_size}){left}: "
            "shorten it or give the worker more memory for its KV cache"
        )

    def _longer(self, prompt: int, max_tokens: int) -> str:
        """Advice for more context, where the model has it."""
        if self.model_context is None:
            return f" or start the worker with --context {prompt + max_tokens}, if the model allows it"
        if prompt + bool(max_tokens) > self.model_context:
            return f", the model itself was made for {self.model_context}"
        return f" or start the worker with --context {min(prompt + max_tokens, self.model_context)}"
