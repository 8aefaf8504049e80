"""A model file, opened and checked, with what turns prompts into its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nightmill import package_directory
from nightmill.jobs.base.contract import Markup, Prompt
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import InvalidParameterError, NightmillError, SettingsError
from nightmill.jobs.reply.structure import closing_of
from nightmill.jobs.request.parameters import MAX_BANNED_TOKENS, GenerationParams
from nightmill.worker.assembly.encoding import PromptEncoder, chat_of
from nightmill.worker.assembly.names import name_of
from nightmill.worker.assembly.reporting import ReportingFile
from nightmill.worker.assembly.reranking import PairEncoder, asked_in_chat
from nightmill.worker.engine.request import ClosingTokens
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.chat import ChatTemplate, Limits
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.pooling import Pooling, ranks_pairs
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.gpu.element_choice import ElementChoice, choose_element
from nightmill.worker.runners.starting import Progress, no_progress

if TYPE_CHECKING:
    from nightmill.jobs.sql.claims import Claim

_NO_CHATS = (
    "messages: this model is an encoder, which embeds texts and answers no chats: give rows with embed; to "
    "rank documents take a cross-encoder, such as bge-reranker-v2-m3, or a model that answers chats, such as "
    "Qwen3-Reranker"
)
_ONLY_CHATS = (
    "messages: this model is a cross-encoder, which ranks documents and answers no chats: give rows with "
    "rerank, or another model"
)
_NO_RANKING = (
    "rerank: this model is an encoder without a head that ranks pairs: take a cross-encoder, such as "
    "bge-reranker-v2-m3, or a model that answers chats, such as Qwen3-Reranker"
)


@dataclass(frozen=True)
class OpenModel:
    """A model file, opened and checked: what an engine needs.

    progress        is told the steps in which an engine on it starts
    plain_products  `Precision.plain_products`
    ledger          descriptor of the accounts of engines that share a GPU (`shared_gpu`); None: it is alone
    grammars        of its texts, if they have been made already (`assembly.engine.with_grammars`)
    """

    file: GgufFile
    spec: ModelSpec
    vocabulary: Vocabulary
    progress: Progress = field(default=no_progress, kw_only=True)
    plain_products: bool = field(default=False, kw_only=True)
    ledger: int | None = field(default=None, kw_only=True)
    grammars: Grammars | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(OpenModel, PromptEncoder):
    """A model file with what turns prompts into tokens."""

    name: str
    pairs: PairEncoder | None = None  # of a cross-encoder

    def tokenize_all(self, claims: Sequence["Claim"]) -> list[tuple[int, ...] | NightmillError]:
        """For each claimed job its token ids, or why it has none: a ChatTemplateError, InvalidPromptError.

        Raises RunnerError where the process that renders chats cannot be started, which is no job's fault.
        """
        if all(claim.params.rerank is None for claim in claims):
            return self._tokenize(claims)
        ranked = [claim for claim in claims if claim.params.rerank is not None]
        of_others = iter(self._tokenize([claim for claim in claims if claim.params.rerank is None]))
        of_ranked = iter(self._ranked(ranked))
        return [next(of_others if claim.params.rerank is None else of_ranked) for claim in claims]

    def _ranked(self, claims: Sequence["Claim"]) -> list[tuple[int, ...] | NightmillError]:
        if self.pairs is not None:
            return self.pairs.encode_all(claims)
        if self.spec.encoder is not None:
            return [InvalidParameterError(_NO_RANKING, field="rerank")] * len(claims)
        return self._tokenize([asked_in_chat(claim) for claim in claims])

    def paired(self, prompt_ids: Sequence[int]) -> tuple[range, int] | None:
        """For the tokens of a pair the places of the states that rank it, and where its second text begins.

        None if the model answers chats. Raises InvalidParameterError for one that gives no relevance.
        """
        if self.pairs is None:
            return None
        return self.pairs.places(len(prompt_ids)), self.pairs.second(prompt_ids)

    def _tokenize(self, claims: Sequence["Claim"]) -> list[tuple[int, ...] | NightmillError]:
        encoded = self.encode_all(
            [_prompt_of(claim) for claim in claims],
            [claim.rendering for claim in claims],
            [claim.requested_at for claim in claims],
        )
        embedded = (self._ended(ids, claim) for ids, claim in zip(encoded, claims, strict=True))
        return [self._truncate(ids, claim) for ids, claim in zip(embedded, claims, strict=True)]

    def embedded(self, params: GenerationParams, tokens: int) -> range:
        """The places of the hidden states that become the embedding of a text of so many tokens.

        Raises InvalidParameterError if the model is not made for embeddings, or for fewer dimensions.
        """
        pooling = self.spec.pooling if params.pooling is None else Pooling(params.pooling)
        if pooling is None and ranks_pairs(self.file, self.spec.family):
            raise InvalidParameterError(
                "embed: this model is a cross-encoder, which ranks pairs of texts and has no embeddings: "
                "give rows with rerank, or take an embedding model",
                field="embed",
            )
        if pooling is None:
            raise InvalidParameterError(
                "pooling: this model was not made for embeddings, as its file says nothing of how hidden "
                "states become one: take a model such as Qwen3-Embedding, or give pooling, last or mean",
                field="pooling",
            )
        if params.dimensions is not None and params.dimensions > self.spec.width:
            raise InvalidParameterError(
                f"dimensions: is {params.dimensions:,}, but embeddings of this model have "
                f"{self.spec.width:,} numbers: give fewer, or leave it out for all",
                field="dimensions",
            )
        return pooling.places(tokens)

    def _ended(
        self, ids: tuple[int, ...] | NightmillError, claim: "Claim"
    ) -> tuple[int, ...] | NightmillError:
        """End a text that is embedded as the file asks for; what an answer follows is not ended."""
        if isinstance(ids, NightmillError) or not claim.params.embed or claim.prompt_ids is not None:
            return ids
        return ids if self.tokenizer.end_id is None else (*ids, self.tokenizer.end_id)

    def _truncate(
        self, ids: tuple[int, ...] | NightmillError, claim: "Claim"
    ) -> tuple[int, ...] | NightmillError:
        """Keep the last tokens of a prompt, as many as its job wants, and its beginning-of-text token."""
        most = claim.params.truncate_prompt_tokens
        if most is None or isinstance(ids, NightmillError) or len(ids) <= most:
            return ids
        bos = self.tokenizer.bos_id if self.tokenizer.add_bos else None
        if claim.prompt_ids is None and most > 1 and bos is not None and ids[0] == bos:
            return (bos, *ids[1 - most :])
        return ids[-most:]

    def markup(self, claim: "Claim", prompt_ids: Sequence[int]) -> Markup | None:
        """The control texts in answers to a chat with this prompt; None for other prompts."""
        if claim.messages is None or isinstance(self.chat, str):
            return None
        return self.chat.markup(claim.rendering, prompt_ids)

    def closing(self, markup: Markup, *, calls: bool) -> ClosingTokens:
        """Return what closes thoughts in a text with this markup; `calls`: calls must follow."""
        assert markup.thinking is not None
        texts = closing_of(markup.thinking, calls=calls)
        inside, before = self.tokenizer.encode_batch(list(texts), special=True, add_bos=False)
        return ClosingTokens(tuple(inside), tuple(before))

    def tokenize_banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Runs of tokens that spell one of these words in a text: each at its beginning, and after a space.

        Raises InvalidParameterError if they have more than MAX_BANNED_TOKENS.
        """
        texts = [start + word.lstrip(" ") for word in words for start in ("", " ")]
        runs = tuple(dict.fromkeys(tuple(ids) for ids in self.tokenizer.encode_batch(texts, add_bos=False)))
        if (count := sum(map(len, runs))) > MAX_BANNED_TOKENS:
            raise InvalidParameterError(
                f"bad_words: have {count:,} tokens in all spellings, and at most {MAX_BANNED_TOKENS:,} are "
                "taken: give fewer or shorter ones",
                field="bad_words",
            )
        return runs

    def tokenize_texts(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokenise each text by itself, to follow a prompt. Raises InvalidPromptError."""
        return tuple(tuple(ids) for ids in self.tokenizer.encode_batch(texts, add_bos=False))

    def spell_token(self, token_id: int) -> tuple[bytes, str]:
        """The bytes that a token adds to a text, and its name."""
        return self.vocabulary.bytes_of(token_id), self.vocabulary.text_of(token_id)


def _prompt_of(claim: "Claim") -> Prompt:
    if claim.prompt_ids is not None:
        return claim.prompt_ids
    if claim.messages is None:
        return claim.prompt or ""
    return claim.messages if isinstance(claim.messages, list) else ["no list"]  # which is no chat


def open_model(settings: Settings, *, progress: Progress | None = None) -> OpenModel:
    """Open and check the model file; raises SettingsError where none is named, ModelFileError for faults.

    `progress` is told how far an engine on it is, and how much of the weights a runner has read.
    """
    file = ReportingFile.open(model_path(settings))
    file.progress = progress
    vocabulary = Vocabulary.from_gguf(file)
    return OpenModel(file, read_spec(file), vocabulary, progress=progress or no_progress)


def load_model(settings: Settings) -> LoadedModel:
    """Open the model file and build its tokenizer, which takes a second; raises as `open_model` does."""
    path = model_path(settings)
    file = GgufFile.open(path)
    tokenizer = Tokenizer.from_gguf(file)
    spec = read_spec(file)
    chat: ChatTemplate | str = _NO_CHATS if spec.ranking is None else _ONLY_CHATS
    # No text of more bytes fits the context.
    fitting = spec.context_length * max(len(token.encode()) for token in tokenizer.vocabulary.tokens)
    limits = Limits(answer_bytes=min(fitting, Limits.answer_bytes))
    if spec.encoder is None:
        chat = chat_of(file, tokenizer, settings.tool_format, limits)
    return LoadedModel(
        name=served_name(settings),
        file=file,
        spec=spec,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer,
        chat=chat,
        pairs=None if spec.ranking is None else PairEncoder(file, spec, tokenizer),
    )


def served_name(settings: Settings) -> str:
    """The name of these settings' model in jobs; raises SettingsError if none is named."""
    return settings.model_name or name_of(model_path(settings))


def model_path(settings: Settings) -> Path:
    """The model's file; raises SettingsError where none is named."""
    if settings.model is None:
        raise SettingsError(
            "no model file is named: give --model FILE or set NIGHTMILL_MODEL (`nightmill demo` uses the "
            "bundled one)"
        )
    return Path(settings.model)  # names have been replaced by paths: see worker.fetching


def demo_model() -> Path:
    """The bundled model."""
    return package_directory() / "_models" / "nightmill-demo.gguf"


def element_of(settings: Settings, model: OpenModel) -> ElementChoice:
    """Choose the element type in which a GPU computes the model, and say why."""
    return choose_element(model.file, model.spec, settings.dtype)
