"""Options that an engine is made with: how tokens become text, and how much it computes at once."""

from collections.abc import Callable
from dataclasses import dataclass

from nightmill.worker.engine.stops import NewTokenDecoder
from nightmill.worker.runners.base import SumArray

__all__ = ["Detokenizer", "EngineSizes", "Rank"]

Rank = Callable[[SumArray, int], bytes]


@dataclass(frozen=True)
class Detokenizer:
    """Functions that turn tokens into text, and the tokens that end one.

    text_stream  makes a fresh decoder of tokens to text
    eos_ids      tokens that end a text
    decode       the text of all tokens at once, as a stream gives it; by default a stream does it
    """

    text_stream: NewTokenDecoder
    eos_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None = None


@dataclass(frozen=True)
class EngineSizes:
    """Limits on the sequences and tokens that an engine computes at once.

    context_length     most tokens of a sequence, prompt included; the KV cache may allow fewer
    max_sequences      most sequences computed at once; at most `runner.slots`
    token_budget       most tokens computed in one step; at least `max_sequences`
    interactive_slots  of `max_sequences`, those that only interactive requests may have
    encodes            the model is an encoder: prompts are computed whole, and nothing is drawn
    model_context      most tokens that the model was made for, where known; what errors may advise
    rank               makes bytes of a pair's relevance of the sum of its pooled states and their number
    """

    context_length: int
    max_sequences: int
    token_budget: int
    interactive_slots: int = 0
    encodes: bool = False
    model_context: int | None = None
    rank: Rank | None = None
