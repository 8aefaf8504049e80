"""Queries and documents to rank: pairs of texts for cross-encoders, questions for models that chat."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from nightmill.jobs.base.contract import JsonObject, Rendering
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, NightmillError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nightmill.jobs.sql.claims import Claim

__all__ = ["INSTRUCTION", "PairEncoder", "asked_in_chat"]

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".'
)
_NO_THOUGHTS: Final = Rendering({"enable_thinking": False})
_OF_ROBERTA: Final = ("t5", "roberta-bpe")
"""Vocabularies whose models were trained with two separators between the texts of a pair."""

Tokens = tuple[int, ...]


def asked_in_chat(claim: "Claim") -> "Claim":
    """The job as a chat that asks whether the document meets the query, in Qwen3-Reranker's words.

    The document is as relevant as `yes` is likely against `no`.
    """
    params = claim.params
    instruction = INSTRUCTION if params.instruction is None else params.instruction
    asked = f"<Instruct>: {instruction}\n<Query>: {params.rerank}\n<Document>: {claim.prompt or ''}"
    messages: list[JsonObject] = [
        {"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked},
    ]  # fmt: skip
    return replace(claim, prompt=None, messages=messages, rendering=_NO_THOUGHTS)


class PairEncoder:
    """Turns queries and documents into the tokens of pairs, as the model's family was trained with.

    The first token, the query, a separator or two, the document, a separator.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        """Raises ModelFileError where the file names no separator."""
        assert spec.ranking is not None
        key = "tokenizer.ggml.seperator_token_id"  # spelt so by llama.cpp
        end = file.integer(key, default=tokenizer.vocabulary.eos_id)
        if end is None or not 0 <= end < tokenizer.vocab_size:
            file.fail(f"{key}: is {end}, expected one of {tokenizer.vocab_size} tokens")
        kinds = file.string("tokenizer.ggml.model"), file.string("tokenizer.ggml.pre", default="")
        self._head = spec.ranking
        self._tokenizer = tokenizer
        self._end: int = end
        self._between = 2 if set(kinds) & set(_OF_ROBERTA) else 1

    def encode_all(self, claims: Sequence["Claim"]) -> list[Tokens | NightmillError]:
        """The tokens of each pair, or why it has none."""
        split, pairs = self._tokenizer.split, ((one.params.rerank or "", one.prompt or "") for one in claims)
        texts = [split(text, special=False) for pair in pairs for text in pair]
        encoded = self._tokenizer.encode_each(texts, add_bos=False)
        return [
            self._pair(query, document, claim.params)
            for query, document, claim in zip(encoded[::2], encoded[1::2], claims, strict=True)
        ]

    @property
    def relevant(self) -> bool:
        """True if the model's head gives one number, a relevance."""
        return self._head.labels == 1

    def pair(self, query: str, document: str) -> Tokens:
        """The tokens of one pair. Raises InvalidPromptError."""
        encode = self._tokenizer.encode
        made = self._pair(encode(query, add_bos=False), encode(document, add_bos=False), GenerationParams())
        assert isinstance(made, tuple)
        return made

    def second(self, tokens: Sequence[int]) -> int:
        """The place in a pair's tokens at which its second text begins. No text has a separator in it."""
        return tokens.index(self._end) + self._between

    def places(self, tokens: int) -> range:
        """The places of the hidden states that a pair of so many tokens is ranked by.

        Raises InvalidParameterError if the model's head does not give one number.
        """
        if not self.relevant:
            raise InvalidParameterError(
                f"rerank: this model gives {self._head.labels} numbers for a pair (cls.output.weight), as "
                "classifiers do, and not one relevance: take a reranker, such as bge-reranker-v2-m3",
                field="rerank",
            )
        return range(tokens if self._head.mean else 1)

    def _pair(
        self, query: list[int] | InvalidPromptError, document: list[int] | InvalidPromptError,
        params: GenerationParams,
    ) -> Tokens | NightmillError:  # fmt: skip
        if isinstance(query, InvalidPromptError):
            return InvalidParameterError(f"rerank: {query}", field="rerank")
        if isinstance(document, InvalidPromptError):
            return document
        bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        first = [*bos, *query, *[self._end] * self._between]
        most = params.truncate_prompt_tokens
        if most is not None:
            if len(first) + 1 > most:
                return InvalidParameterError(
                    f"truncate_prompt_tokens: is {most}, but the query has {len(query)} tokens, and there "
                    f"are {len(first) + 1 - len(query)} beside it: give more, or a shorter query",
                    field="truncate_prompt_tokens",
                )
            document = document[: most - len(first) - 1]
        return (*first, *document, self._end)
