"""The table of generation parameters: types, ranges, defaults and sentences of help."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nightmill.jobs.base.contract import MAX_TOKEN_ID, unstorable
from nightmill.jobs.base.sentences import sentence
from nightmill.jobs.errors import InvalidParameterError

MAX_SEED = 2**63 - 1  # seeds live in a signed 64-bit SQL column

MAX_ANSWERS = 128  # answers of one job
MAX_ANSWER_TOKENS = 1 << 20  # tokens of several answers, which are stored in one row

MAX_LOGPROBS = 20  # likely tokens listed with each token of the answer
MAX_JOB_LOGPROBS = 1 << 20  # tokens and likely tokens of a job together

MAX_BIASES = 1_024  # tokens of a job that have a bias
MAX_BAD_WORDS = 256  # bad words of a job, each of at most
MAX_BAD_WORD = 256  # characters;
MAX_BANNED_TOKENS = 1_024  # and the tokens of all their spellings

POOLINGS = ("last", "mean")  # of hidden states, in an embedding

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class GenerationParams(BaseModel):
    """Generation parameters; the fields and defaults are part of the public API.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. A `seed` of
    None is drawn at enqueue and kept in the job's row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: int = Field(
        default=256, le=1_000_000, description="Most tokens to generate.", json_schema_extra={"minimum": 1}
    )
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_k: int = Field(
        default=0,
        ge=0,
        le=2**31 - 1,
        description="Draw among the K likeliest tokens; 0 is off, and so is -1.",
        json_schema_extra={"minimum": -1},
    )
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Draw among the likeliest tokens that make up P."
    )
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Drop tokens less likely than P times the likeliest."
    )
    repetition_penalty: float = Field(
        default=1.0, ge=0.01, le=100.0, description="Above 1, tokens already there get less likely."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="Above 0, tokens that the answer has get less likely."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="The same for each time that the answer has the token."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="The same seed repeats the text; by default, and for -1, one is drawn.",
        json_schema_extra={"minimum": -1},
    )
    stop: tuple[str, ...] = Field(default=(), max_length=16, description="End before this text.")
    ignore_eos: bool = Field(default=False, description="Continue where the model would end its text.")
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(), max_length=256, description="End before this token, too."
    )
    min_tokens: int = Field(
        default=0, ge=0, le=1_000_000, description="Least number of tokens before the text may end."
    )
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict,
        max_length=MAX_BIASES,
        description="Make tokens likelier, or less, by -100 to 100, such as '{\"50256\": -100}'.",
    )
    bad_words: tuple[str, ...] = Field(
        default=(), max_length=MAX_BAD_WORDS, description="The answer never has this text."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token, and of this many likeliest ones.",
    )
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS, description="Number of answers, each with its own seed.")
    echo: bool = Field(default=False, description="The text begins with the prompt, which must be plain.")
    score: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_ANSWERS,
        description="Generate nothing: compute how likely each of these texts is after the prompt.",
    )

    include_stop_str_in_output: bool = Field(
        default=False, description="Include the stop string at the end of the text."
    )

    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="The same as logprobs for the tokens of the prompt.",
    )
    return_token_ids: bool = Field(
        default=False, description="Tell the token ids of the prompt and of the answers."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Of a longer prompt take the last so many tokens."
    )

    max_reasoning_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Close the model's reasoning after so many tokens, so that an answer follows.",
    )
    embed: bool = Field(
        default=False, description="Generate nothing: compute the embedding of the text, of length 1."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=65_536, description="Keep the first so many numbers of the embedding."
    )
    pooling: str | None = Field(
        default=None,
        description="Hidden states that become the embedding: last or mean; by default as the file says.",
        json_schema_extra={"enum": ["last", "mean"]},
    )

    rerank: str | None = Field(
        default=None,
        description="A query. Generate nothing: compute how relevant the prompt, a document, is for it.",
    )
    instruction: str | None = Field(
        default=None,
        description="The task of reranking, for chat models; by default to find passages that answer.",
    )

    @property
    def only_echo(self) -> bool:
        """True if nothing is generated: the text is the prompt."""
        return self.max_tokens == 0

    @property
    def answers(self) -> int:
        """The number of answers of the job; each scored text counts as one."""
        return len(self.score) or self.n

    @field_validator("max_tokens")
    @classmethod
    def _no_number_of_tokens_is_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("must be at least 1")
        return value

    @model_validator(mode="after")
    def _some_token_is_wanted(self) -> Self:
        """Refuse `max_tokens` 0 without `echo`; the error names `max_tokens`, as this is the only check
        across fields."""
        if self.only_echo and not self.echo:
            raise ValueError("must be at least 1 (got 0), unless echo is true")
        return self

    @field_validator("top_k", mode="before")
    @classmethod
    def _off_is_also_minus_one(cls, value: Any) -> Any:
        """Accept -1 for off, like vLLM."""
        return 0 if type(value) is int and value == -1 else value

    @field_validator("seed", mode="before")
    @classmethod
    def _any_seed_is_also_minus_one(cls, value: Any) -> Any:
        """Accept -1 for any seed, like vLLM and llama.cpp."""
        return None if type(value) is int and value == -1 else value

    @field_validator("stop", "bad_words", "score", mode="before")
    @classmethod
    def _accept_one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _accept_one_id_or_many(cls, value: Any) -> Any:
        if type(value) is int:
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_are_texts_in_json(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        biases = {_token_id(key): bias for key, bias in value.items()}
        if len(biases) < len(value):
            raise ValueError("names a token twice")
        return biases

    @field_validator("min_tokens")
    @classmethod
    def _fewest_are_not_more_than_most(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")  # missing if it is invalid itself, which is reported first
        if most and value > most:
            raise ValueError(f"must not be more than max_tokens, which is {most}")
        return value

    @field_validator("max_reasoning_tokens")
    @classmethod
    def _some_tokens_are_left_for_the_answer(cls, limit: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if limit is not None and most is not None and limit > 0 and limit >= most:
            raise ValueError(f"must be less than max_tokens, which is {most}, so that an answer can follow")
        return limit

    @field_validator("n")
    @classmethod
    def _answers_fit_into_a_row(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and value > 1 and value * most > MAX_ANSWER_TOKENS:
            raise ValueError(
                f"so many answers of up to {most:,} tokens may have more than {MAX_ANSWER_TOKENS:,} in all; "
                "give fewer, or a smaller max_tokens"
            )
        return value

    @field_validator("n")
    @classmethod
    def _log_probabilities_fit_into_a_row(cls, value: int, info: ValidationInfo) -> int:
        most, likely = info.data.get("max_tokens"), info.data.get("logprobs")
        if most is not None and likely is not None and value * most * (likely + 1) > MAX_JOB_LOGPROBS:
            raise ValueError(
                f"{value} answers of up to {most:,} tokens with {likely} logprobs each may have more than "
                f"{MAX_JOB_LOGPROBS:,} log-probabilities; give fewer, or a smaller max_tokens"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_storable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text:
                raise ValueError("a stop string must not be empty")
            if problem := unstorable(text):
                raise ValueError(f"a stop string {problem}")
        return value

    @field_validator("bad_words")
    @classmethod
    def _bad_words_are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text.strip():
                raise ValueError("a bad word must have more than spaces")
            if len(text) > MAX_BAD_WORD:
                raise ValueError(
                    f"a bad word must have at most {MAX_BAD_WORD} characters (got {len(text):,})"
                )
            if problem := unstorable(text):
                raise ValueError(f"a bad word {problem}")
        return value

    @field_validator("score")
    @classmethod
    def _scored_texts_are_texts(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in value:
            if not text:
                raise ValueError("a text to score must not be empty")
            if problem := unstorable(text):
                raise ValueError(f"a text to score {problem}")
        if value and (info.data.get("n", 1) != 1 or info.data.get("echo")):
            raise ValueError("goes with neither n nor echo: nothing is generated; give one of them")
        likely = info.data.get("logprobs") or 0
        if (length := sum(map(len, value))) * (likely + 1) > MAX_JOB_LOGPROBS:
            raise ValueError(
                f"texts of {length:,} characters with {likely} logprobs each may have more than "
                f"{MAX_JOB_LOGPROBS:,} log-probabilities; give fewer or shorter ones"
            )
        return value

    @field_validator("prompt_logprobs", "return_token_ids")
    @classmethod
    def _scores_tell_of_their_texts(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("score") and value not in (None, False):
            raise ValueError("does not go with score, which tells of its texts alone; give one of them")
        return value

    @field_validator("embed")
    @classmethod
    def _embeddings_have_no_answers(cls, value: bool, info: ValidationInfo) -> bool:
        asking = ("n", "echo", "score", "logprobs", "prompt_logprobs", "return_token_ids")
        usual = {name: cls.model_fields[name].default for name in asking}
        given = [name for name in asking if info.data.get(name, usual[name]) != usual[name]]
        if value and given:
            raise ValueError(f"does not go with {given[0]}: nothing is generated; give one of them")
        return value

    @field_validator("rerank")
    @classmethod
    def _relevance_has_no_answers(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if not value.strip():
            raise ValueError("must be a text, not an empty one")
        if problem := unstorable(value):
            raise ValueError(f"a query {problem}")
        asking = ("n", "echo", "score", "logprobs", "prompt_logprobs", "return_token_ids", "embed")
        usual = {name: cls.model_fields[name].default for name in asking}
        given = [name for name in asking if info.data.get(name, usual[name]) != usual[name]]
        if given:
            raise ValueError(f"does not go with {given[0]}: nothing is generated; give one of them")
        return value

    @field_validator("instruction")
    @classmethod
    def _only_reranking_has_a_task(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if "rerank" in info.data and info.data["rerank"] is None:
            raise ValueError("is for reranking; give rerank too")
        if problem := unstorable(value):
            raise ValueError(f"an instruction {problem}")
        return value

    @field_validator("pooling")
    @classmethod
    def _pooling_is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in POOLINGS:
            raise ValueError("must be last or mean")
        return value

    @field_validator("dimensions", "pooling")
    @classmethod
    def _only_embeddings_have_them(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("embed", True):
            raise ValueError("is for embeddings; give embed too")
        return value

    @property
    def draws_nothing(self) -> bool:
        """True if no token is generated: it scores texts, repeats its prompt, embeds it, or ranks it."""
        return bool(self.score) or self.only_echo or self.gives_numbers

    @property
    def gives_numbers(self) -> bool:
        """True if its result is kept among embeddings: the embedding of its prompt, or its relevance."""
        return self.embed or self.rerank is not None

    @property
    def tells_beside(self) -> bool:
        """Its job tells more than its answers and their log-probabilities."""
        return self.return_token_ids or self.prompt_logprobs is not None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check `values`; raises InvalidParameterError that names the first bad field."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if not first["loc"]:
                raise InvalidParameterError(
                    f"max_tokens: {sentence(first, value=False)}", field="max_tokens"
                ) from None
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise InvalidParameterError(
                    f"{name}: unknown parameter; known are {known}", field=name
                ) from None
            raise InvalidParameterError(f"{name}: {sentence(first)}", field=name) from None


def _token_id(key: Any) -> Any:
    """Parse a key of a JSON object as a token id."""
    return int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key


_DIGITS = re.compile("[0-9]{1,10}")
DEFAULTS = GenerationParams()
REPEATED = ("temperature", "top_p")
"""Parameters that OpenAI's responses repeat."""
