"""The seam between a worker's service and the model's tokens: chats, tokenising, spelling of tokens."""

from collections.abc import Sequence
from typing import Protocol

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.engine.request import ClosingTokens

__all__ = ["Prompting", "TokenIds"]

TokenIds = tuple[int, ...]


class Prompting(Protocol):
    """Turns claimed jobs into token ids, and token ids into text, as the loaded model does."""

    def tokenize_all(self, claims: Sequence[Claim], /) -> Sequence[TokenIds | NightmillError]:
        """Tokenise a shard at once: for each claim, in order, its token ids or the job's error.

        Raises RunnerError where the process that renders chats cannot be started, which is no job's fault.
        """
        ...

    def tokenize_texts(self, texts: Sequence[str], /) -> tuple[TokenIds, ...]:
        """Tokenise each text by itself, to follow a prompt. Raises InvalidPromptError."""
        ...

    def tokenize_banned(self, words: Sequence[str], /) -> tuple[TokenIds, ...]:
        """Runs of tokens that spell a banned word in a text. Raises InvalidParameterError if too long."""
        ...

    def embedded(self, params: GenerationParams, tokens: int, /) -> range:
        """The places of the hidden states that become the embedding of a text of so many tokens.

        Raises InvalidParameterError if the model is not made for embeddings, or for fewer dimensions.
        """
        ...

    def paired(self, prompt_ids: TokenIds, /) -> tuple[range, int] | None:
        """For the tokens of a pair the places of the states that rank it, and where its second text begins.

        None if the model answers chats. Raises InvalidParameterError for one that gives no relevance.
        """
        ...

    def spell_token(self, token_id: int, /) -> tuple[bytes, str]:
        """The bytes that a token adds to a text, and its name."""
        ...

    def markup(self, claim: Claim, prompt_ids: TokenIds, /) -> Markup | None:
        """The control texts in answers to a chat with this prompt; None for other prompts."""
        ...

    def closing(self, markup: Markup, /, *, calls: bool) -> ClosingTokens:
        """Return what closes thoughts in a text with this markup; `calls`: calls must follow."""
        ...
