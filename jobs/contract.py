"""The words that client and worker share: states, stop reasons, and what a job asks for. No I/O here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypeGuard

MAX_ERROR_LENGTH = 4_000  # characters of an error that are kept

JsonObject = dict[str, Any]

MAX_TOKEN_ID = 2**31 - 1


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


class WorkerState(_Word):
    """What a worker does. The last two have ended."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"  # in order
    LOST = "lost"  # it fell silent, and may come back
