"""A model's vocabulary as llguidance reads it: the exact bytes of every token that text is spelt with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLTokenizer

from nightmill.jobs.errors import ConstraintError
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import IntArray, mask_words

_PLAIN = r'[^"\\\x00-\x1F\x7F]'  # what a JSON string holds without escapes
SLICES = [_PLAIN + f"{{1,{most}}}" for most in (1, 2, 4, 7, 11, 16, 30)] + [_PLAIN + "+"]
"""Sets of tokens that llguidance allows as a whole where all of a set may follow, instead of trying each.

Of its own there are three, from ten characters on: of 150,000 tokens a mask took 1.5 ms wherever a string had
fewer characters left, as those come to have that a schema bounds. No mask hangs on these sets.
"""


class _Spelling:
    """A tokenizer as llguidance expects one. It is never asked to tokenise, since nothing is forced."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end

    def __call__(self, text: str) -> list[int]:
        raise AssertionError(f"asked to tokenise {text[:50]!r}")


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """Tokens as matchers know them. `ordinary` and `ends` are masks: of those that spell text, and end it."""

    tokenizer: LLTokenizer
    ordinary: IntArray
    ends: IntArray

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that tokens spell, as far as grammars know it."""
        return self.tokenizer.decode_bytes(list(token_ids)).decode(errors="replace")


def grammar_tokens(
    vocabulary: Vocabulary, vocab: int, *, marks: frozenset[int] = frozenset()
) -> GrammarTokens:
    """The tokens of a model whose ids are below `vocab`: 0.7 s for 128,000 of them.

    A token that structures prompts (control tokens, `<tool_call>`) has no bytes here: whatever a grammar
    says, no answer is spelt with one. `marks`: but for these, which mark up calls of tools or thoughts.
    Raises ConstraintError for a model without a token that ends a text.
    """
    ends = sorted(vocabulary.eos_ids)
    if not ends:
        raise ConstraintError(
            "this model's file names no token that ends a text, so no answer can be held to it"
        )
    markers = vocabulary.markers().keys()
    spelt = [
        b"" if text in markers and token_id not in marks else vocabulary.bytes_of(token_id)
        for token_id, text in enumerate(vocabulary.tokens[:vocab])
    ]
    for end in ends:
        spelt[end] = b""
    spelt += [b""] * (vocab - len(spelt))
    tokenizer = LLTokenizer(_Spelling(spelt, ends[0]), eos_token=ends, slices=SLICES)  # type: ignore[arg-type]
    return GrammarTokens(
        tokenizer, _mask((token for token, text in enumerate(spelt) if text), vocab), _mask(ends, vocab)
    )


def _mask(token_ids: Iterable[int], vocab: int) -> IntArray:
    bits = np.zeros(32 * mask_words(vocab), dtype=np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
