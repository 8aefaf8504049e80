"""The words that client and worker share: job states, stop reasons, parameters, jobs. No I/O here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.sentences import sentence

MAX_SEED = 2**63 - 1  # seeds live in a signed 64-bit SQL column

MAX_ERROR_LENGTH = 4_000  # characters of an error that are kept

MAX_ANSWERS = 128  # of one job
MAX_ANSWER_TOKENS = 1 << 20  # of all answers of a job together, where there are several: they are one row

JsonObject = dict[str, Any]

MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class _Word(StrEnum):
    """A word that is kept in a column."""

    @classmethod
    def read(cls, value: str) -> Self:
        """The member of that value. A word of a newer version stands for itself: its row can be shown."""
        try:
            return cls(value)
        except ValueError:
            stranger = str.__new__(cls, value)
            stranger._name_ = stranger._value_ = str(value)
            return stranger


class JobState(_Word):
    """Where a job stands. Only the last three states are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """True if no worker will touch the job again unless it is retried."""
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class StopReason(_Word):
    """Why a text ends where it does."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"

    @property
    def state(self) -> JobState:
        """The final state of a job that stopped for this reason."""
        return _STATE_AFTER.get(self, JobState.SUCCEEDED)


# A job that met its deadline lacks (the end of) its answer, so it counts as failed and can be retried.
_STATE_AFTER = {
    StopReason.CANCELLED: JobState.CANCELLED,
    StopReason.DEADLINE: JobState.FAILED,
    StopReason.ERROR: JobState.FAILED,
}


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
    n: int = Field(
        default=1, ge=1, le=MAX_ANSWERS, description="So many answers, each with a seed of its own."
    )

    @field_validator("stop", mode="before")
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

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_storable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text:
                raise ValueError("a stop string must not be empty")
            if problem := unstorable(text):
                raise ValueError(f"a stop string {problem}")
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
            if getattr(self, name) == type(self).model_fields[name].default:
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


_LATER = ("stop_token_ids", "min_tokens", "n")
"""Parameters that were not there from the beginning."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(text: str, limit: int | None = None) -> str:
    """`text` as SQL can hold it: NUL and lone surrogates become U+FFFD; cut to `limit` characters."""
    if limit is not None and len(text) > limit:
        note = f" ... (cut: {len(text):,} characters)"
        text = text[: max(0, limit - len(note))] + note
    return _UNSTORABLE.sub("\ufffd", text)


def unstorable(text: str) -> str | None:
    """Say why `text` cannot be stored and tokenised as UTF-8 (None if it can)."""
    if "\x00" in text:
        return f"contains a NUL character at position {text.index(chr(0))}, which SQL text cannot hold"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"contains a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}: "
            "it is not valid Unicode; decode the input properly before enqueueing"
        )
    return None


Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, a chat, or token ids."""


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    """Whether this is a list of numbers that may be token ids, and not of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in value)
    )


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a model's template makes a prompt of a chat.

    variables               what else the template may look at, by name
    add_generation_prompt   open the message that the model is to write
    continue_final_message  the prompt ends with the last message's text, which the model goes on with
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def values(self) -> JsonObject:
        """As a row keeps it."""
        return {
            "variables": dict(self.variables),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """What a row holds; None if it holds nothing that this version can read."""
        if not isinstance(values, dict) or values.keys() != cls().values().keys():
            return None
        flags = values["add_generation_prompt"], values["continue_final_message"]
        if not isinstance(values["variables"], dict) or not all(isinstance(flag, bool) for flag in flags):
            return None
        return cls(values["variables"], *flags)


AS_USUAL = Rendering()


class ConstraintKind(_Word):
    """In which language it is said what an answer must be."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constrained:
    """What an answer must be: a schema (JSON), a regular expression, texts (a JSON list) or a grammar."""

    kind: ConstraintKind
    text: str

    def values(self) -> JsonObject:
        """As a row keeps it."""
        return {"kind": str(self.kind), "text": self.text}

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """What a row holds; None if it holds nothing that this version can read."""
        kind, text = (values.get("kind"), values.get("text")) if isinstance(values, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(text, str):
            return None
        return cls(ConstraintKind.read(kind), text)


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers of a job."""

    text: str
    stop_reason: StopReason
    completion_tokens: int
    seed: int  # a job of its own with this seed has the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and what became of it: a snapshot of its row."""

    id: str
    state: JobState
    prompt: str | None  # a plain prompt, or
    messages: list[JsonObject] | None  # a chat, or
    prompt_ids: list[int] | None = None  # a plain prompt as the model's token ids
    params: GenerationParams  # with its seed
    rendering: Rendering | None = None  # how the messages become a prompt; None: as usual
    constrained: Constrained | None = None  # what the answer must be; None: anything
    model: str | None = None  # None: whatever model the worker serves
    batch: str | None = None
    custom_id: str | None = None
    row: int | None = None  # place in the batch's file, from 1
    stop_reason: StopReason | None = None
    text: str | None = None  # of the first answer
    several: tuple[Answer, ...] = ()  # all answers in order, where more than one was asked for: see `answers`
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # of all answers together
    arithmetic: str | None = None  # that computed the text (`jobs.arithmetic`); older rows have none
    error: str | None = None
    errors: list[JsonObject] = field(default_factory=list)  # one entry per attempt that failed or was charged
    attempt: int = 0  # times claimed; the fencing token
    failures: int = 0  # attempts that died with this job alone in its worker; others are nobody's
    max_attempts: int = 3  # so many of them, and the job is failed
    priority: int = 5
    worker: str | None = None
    owner: str | None = None  # the name of the key that it came with over HTTP
    idempotency_key: str | None = None
    metadata: JsonObject = field(default_factory=dict)
    cancel_requested_at: datetime | None = None
    created_at: datetime
    scheduled_at: datetime | None = None
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seed(self) -> int | None:
        """The seed that repeats this job's text on the same model and runner."""
        return self.params.seed

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Its answers in order, once it has ended. One that had not begun to write has none."""
        if self.several or self.text is None or self.stop_reason is None:
            return self.several
        return (Answer(self.text, self.stop_reason, self.completion_tokens or 0, self.seed or 0),)

    @property
    def parsed(self) -> Any:
        """The value of an answer that had to be JSON. None if it had not, or is not whole.

        It is whole if it ended by itself (`stop_reason` is eos): then it obeys its schema.
        """
        return self.parsed_answers[0] if self.answers else None

    @property
    def parsed_answers(self) -> list[Any]:
        """As `parsed`, of each answer."""
        asked = self.constrained
        if asked is None or asked.kind is not ConstraintKind.JSON_SCHEMA:
            return [None] * len(self.answers)
        return [
            json.loads(answer.text) if answer.stop_reason is StopReason.EOS else None
            for answer in self.answers
        ]


class WorkerState(_Word):
    """What a worker does. The last two have ended."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"  # in order
    LOST = "lost"  # it fell silent, and may come back


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that generates, and its last sign of life: a snapshot of its row."""

    id: str
    host: str
    pid: int
    gpu: str | None
    model: str
    state: WorkerState
    started_at: datetime
    heartbeat_at: datetime
    detail: str | None  # what it is doing, as while it loads

    @property
    def has_served(self) -> bool:
        """True once it takes jobs, also if it has ended since."""
        # One that is lost had not come to serve if it says what it was loading.
        return self.state is not WorkerState.STARTING and not (self.state is WorkerState.LOST and self.detail)
