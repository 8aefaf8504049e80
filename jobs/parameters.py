"""The parameters of generation: their types, ranges, defaults and sentences of help, in one table."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from nightmill.jobs.contract import MAX_TOKEN_ID, JsonObject, unstorable
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.sentences import sentence

MAX_SEED = 2**63 - 1  # seeds live in a signed 64-bit SQL column

MAX_ANSWERS = 128  # of one job
MAX_ANSWER_TOKENS = 1 << 20  # of all answers of a job together, where there are several: they are one row

MAX_LOGPROBS = 20  # likely tokens that are told beside each of the answer
MAX_JOB_LOGPROBS = 1 << 20  # of all tokens and likely tokens of a job together

MAX_BIASES = 1_024  # tokens of a job that have a bias
MAX_BAD_WORDS = 256  # of a job, each of at most
MAX_BAD_WORD = 256  # characters;
MAX_BANNED_TOKENS = 1_024  # and the tokens of all their spellings

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class GenerationParams(BaseModel):
    """How to generate; the fields and defaults are part of the public API.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. A `seed` of
    None is drawn at enqueue and kept in the job's row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: int = Field(default=256, ge=1, le=1_000_000, description="Most tokens to generate.")
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_k: int = Field(
        default=0, ge=0, le=2**31 - 1, description="Draw among the K likeliest tokens; 0 is off."
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
        description="The same seed repeats the text; by default one is drawn.",
    )
    stop: tuple[str, ...] = Field(default=(), max_length=16, description="End before this text.")
    ignore_eos: bool = Field(default=False, description="Go on where the model would end its text.")
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(), max_length=256, description="End before this token, too."
    )
    min_tokens: int = Field(
        default=0, ge=0, le=1_000_000, description="Nothing ends the text before so many tokens."
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
        description="Tell the log-probability of each token, and of so many of the likeliest ones.",
    )
    n: int = Field(
        default=1, ge=1, le=MAX_ANSWERS, description="So many answers, each with a seed of its own."
    )
    echo: bool = Field(default=False, description="The text begins with the prompt, which must be plain.")
    score: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_ANSWERS,
        description="No answer: tell how likely each of these texts is after the prompt.",
    )

    @property
    def answers(self) -> int:
        """How many answers its job has: a text that is scored is one, too."""
        return len(self.score) or self.n

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
        most = info.data.get("max_tokens")  # missing if it is wrong itself, which is said first
        if most is not None and value > most:
            raise ValueError(f"must not be more than max_tokens, which is {most}")
        return value

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

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check `values`; raises InvalidParameterError that names the first bad field."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "parameters"
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise InvalidParameterError(
                    f"{name}: unknown parameter; known are {known}", field=name
                ) from None
            raise InvalidParameterError(f"{name}: {sentence(first)}", field=name) from None

    def stored(self) -> JsonObject:
        """As a row keeps it; the seed has a column of its own.

        What came later is left out unless it is said. So a worker of an older version runs what it can, and
        the fingerprint of a job that an older version has entered stays the same.
        """
        values = self.model_dump(mode="json", exclude={"seed"})
        for name in _LATER:
            if getattr(self, name) == getattr(DEFAULTS, name):
                del values[name]
        return values

    @classmethod
    def read(cls, values: Any) -> Self:
        """What a row holds, as it is, for showing: unchecked, and without what only other versions know."""
        known = (
            {name: values[name] for name in cls.model_fields if name in values}
            if isinstance(values, dict)
            else {}
        )
        try:
            return cls.model_validate(known)
        except ValidationError:
            return cls.model_construct(**known)


def _token_id(key: Any) -> Any:
    """A key of a JSON object as the number that it spells."""
    return int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key


_DIGITS = re.compile("[0-9]{1,10}")
DEFAULTS = GenerationParams()
_LATER = (
    "stop_token_ids", "min_tokens", "n", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "logprobs", "echo", "score",
)  # fmt: skip
"""Parameters that were not there from the beginning."""
