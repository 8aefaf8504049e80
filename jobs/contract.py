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
class Tools:
    """The functions that a model may call, each as OpenAI's API describes a tool.

    required  the answer must be a call
    function  the one that must be called, by name; None: whichever it likes
    parallel  an answer may have several calls
    """

    functions: Sequence[JsonObject]
    required: bool = False
    function: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """What the functions are called."""
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def strict(self) -> bool:
        """Whether calls of any function are held to its schema where none must be made."""
        return any(tool["function"].get("strict") is True for tool in self.functions)

    def values(self) -> JsonObject:
        """As a row keeps it."""
        return {
            "functions": list(self.functions),
            "required": self.required,
            "function": self.function,
            "parallel": self.parallel,
        }

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """What a row holds; None if it holds nothing that this version can read."""
        if not isinstance(values, dict) or values.keys() != cls(()).values().keys():
            return None
        functions, function = values["functions"], values["function"]
        if not isinstance(functions, list) or not functions or not all(map(_is_tool, functions)):
            return None
        flags = values["required"], values["parallel"]
        if not all(isinstance(flag, bool) for flag in flags) or not isinstance(function, str | None):
            return None
        made = cls(functions, values["required"], function, values["parallel"])
        return made if function is None or function in made.names else None


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters", {}), dict)


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a model's template makes a prompt of a chat.

    variables               what else the template may look at, by name
    add_generation_prompt   open the message that the model is to write
    continue_final_message  the prompt ends with the last message's text, which the model goes on with
    tools                   what the model is told that it may call
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None

    def values(self) -> JsonObject:
        """As a row keeps it."""
        values: JsonObject = {
            "variables": dict(self.variables),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return values if self.tools is None else values | {"tools": self.tools.values()}

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """What a row holds; None if it holds nothing that this version can read."""
        if not isinstance(values, dict) or values.keys() - {"tools"} != cls().values().keys():
            return None
        flags = values["add_generation_prompt"], values["continue_final_message"]
        if not isinstance(values["variables"], dict) or not all(isinstance(flag, bool) for flag in flags):
            return None
        tools = Tools.read(values["tools"]) if "tools" in values else None
        if "tools" in values and tools is None:
            return None
        return cls(values["variables"], *flags, tools)


AS_USUAL = Rendering()


class ConstraintKind(_Word):
    """In which language it is said what an answer must be."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"
    """Of a model's own way to write calls of tools; workers say it, and no row."""


KINDS_OF_ROWS = tuple(kind for kind in ConstraintKind if kind is not ConstraintKind.CALLS)


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


class CallFormat(_Word):
    """How a model writes calls of tools into its text."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} as the whole text, perhaps behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    MISTRAL_NAMED = "mistral-named"  # [TOOL_CALLS]name[ARGS]{...}
    JSON = "json"  # {"name": ..., "arguments": {...}} as the whole text, or a list of such


@dataclass(frozen=True, slots=True)
class Markup:
    """What a text holds beside the answer proper, as the worker knew that wrote it.

    calls     how calls of tools are written in it
    thinking  the marks around what the model thinks before it answers
    opened    the prompt has written the first of these marks
    """

    calls: CallFormat | None = None
    thinking: tuple[str, str] | None = None
    opened: bool = False

    def values(self) -> JsonObject:
        """As a row keeps it."""
        return {
            "calls": None if self.calls is None else str(self.calls),
            "thinking": None if self.thinking is None else list(self.thinking),
            "opened": self.opened,
        }

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """What a row holds; None if it holds nothing that this version can read."""
        match values:
            case {"calls": str() | None as calls, "thinking": thinking, "opened": bool(opened)}:
                known = None if calls is None else CallFormat.read(calls)
            case _:
                return None
        match thinking:
            case None:
                return cls(known, None, opened)
            case [str(begin), str(end)] if begin and end:
                return cls(known, (begin, end), opened)
        return None
