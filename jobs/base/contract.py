"""Types that client and worker share: states, stop reasons, and the parts of a request. No I/O here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self, TypeGuard

MAX_ERROR_LENGTH = 4_000  # characters of an error that are stored

JsonObject = dict[str, Any]

# Part of the error for long prompts; clients search for these words.
PAST_CONTEXT = "exceeds the available context size"
MAX_TOKEN_ID = 2**31 - 1


class _Word(StrEnum):
    """An enumeration whose values are stored in a column."""

    @classmethod
    def read(cls, value: str) -> Self:
        """Return the member with this value. An unknown value, written by a newer version, becomes a member
        of its own, so that its row can be shown."""
        try:
            return cls(value)
        except ValueError:
            stranger = str.__new__(cls, value)
            stranger._name_ = stranger._value_ = str(value)
            return stranger


class JobState(_Word):
    """The state of a job. Only the last three states are final."""

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
    """The reason why a text ended."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    BUDGET = "budget"
    ERROR = "error"

    @property
    def state(self) -> JobState:
        """The final state of a job that stopped for this reason."""
        return _STATE_AFTER.get(self, JobState.SUCCEEDED)


# A job that met its deadline, or whose batch was stopped by a limit, has an incomplete answer or none: it
# counts as failed and can be retried.
_STATE_AFTER = {
    StopReason.CANCELLED: JobState.CANCELLED,
    StopReason.DEADLINE: JobState.FAILED,
    StopReason.BUDGET: JobState.FAILED,
    StopReason.ERROR: JobState.FAILED,
}


HELD_UNTIL = datetime(9999, 1, 1, tzinfo=UTC)
"""The time to begin of a row that waits for the row before it: workers of all versions leave it alone."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(text: str, limit: int | None = None) -> str:
    """Make `text` storable in SQL: NUL and lone surrogates become U+FFFD, and it is cut to `limit`
    characters."""
    if limit is not None and len(text) > limit:
        note = f" ... (cut: {len(text):,} characters)"
        text = text[: max(0, limit - len(note))] + note
    return _UNSTORABLE.sub("\ufffd", text)


def unstorable(text: str) -> str | None:
    """Describe why `text` cannot be stored and tokenised as UTF-8; None if it can."""
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
    """Return True for a non-empty list of possible token ids, as opposed to a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value)
    )


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that a model may call, each as OpenAI's API describes a tool.

    required  the answer must be a call
    function  name of the function that must be called; None: the model chooses
    parallel  an answer may have several calls
    """

    functions: Sequence[JsonObject]
    required: bool = False
    function: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def strict(self) -> bool:
        """True if any function asks that its calls obey its schema, even where no call is required."""
        return any(tool["function"].get("strict") is True for tool in self.functions)

    def values(self) -> JsonObject:
        """Return the JSON object that a row stores."""
        return {
            "functions": list(self.functions),
            "required": self.required,
            "function": self.function,
            "parallel": self.parallel,
        }

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Parse the JSON object of a row; None if this version cannot read it."""
        if not isinstance(values, dict) or values.keys() != cls(()).values().keys():
            return None
        functions, function = values["functions"], values["function"]
        if not isinstance(functions, list) or not functions or not all(map(_is_tool, functions)):
            return None
        flags = values["required"], values["parallel"]
        if not all(isinstance(flag, bool) for flag in flags) or not isinstance(function, str | None):
            return None
        tools = cls(functions, values["required"], function, values["parallel"])
        return tools if function is None or function in tools.names else None


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters", {}), dict)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Options for rendering a chat into a prompt with the model's template.

    variables               further variables of the template, by name
    add_generation_prompt   open the message that the model is to write
    continue_final_message  end the prompt with the last message's text, which the model continues
    tools                   functions that the model is told of
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None

    def values(self) -> JsonObject:
        """Return the JSON object that a row stores."""
        values: JsonObject = {
            "variables": dict(self.variables),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return values if self.tools is None else values | {"tools": self.tools.values()}

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Parse the JSON object of a row; None if this version cannot read it."""
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
    """The language of a constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"
    """Tool calls in the model's own syntax; made by workers, never stored in a row."""
    BEHIND = "behind"
    """An answer after the model's reasoning; made by workers, never stored in a row."""


_KINDS_OF_WORKERS = (ConstraintKind.CALLS, ConstraintKind.BEHIND)
KINDS_OF_ROWS = tuple(kind for kind in ConstraintKind if kind not in _KINDS_OF_WORKERS)


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constraint on an answer: a JSON schema, a regular expression, a JSON list of texts, or a grammar."""

    kind: ConstraintKind
    text: str

    def values(self) -> JsonObject:
        """Return the JSON object that a row stores."""
        return {"kind": str(self.kind), "text": self.text}

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Parse the JSON object of a row; None if this version cannot read it."""
        kind, text = (values.get("kind"), values.get("text")) if isinstance(values, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(text, str):
            return None
        return cls(ConstraintKind.read(kind), text)


class WorkerState(_Word):
    """The state of a worker. The last two are final."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"  # it has no GPU and takes no jobs, until its hours begin or somebody resumes it
    STOPPED = "stopped"  # ended in order
    LOST = "lost"  # it fell silent, and may come back


class CallFormat(_Word):
    """The syntax in which a model writes tool calls."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} as the whole text, perhaps behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    MISTRAL_NAMED = "mistral-named"  # [TOOL_CALLS]name[ARGS]{...}
    QWEN_XML = "qwen-xml"  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    GLM_XML = "glm-xml"  # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    GEMMA = "gemma"  # <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
    PYTHONIC = "pythonic"  # [name(key='value')] as the whole text
    LFM2 = "lfm2"  # <|tool_call_start|>[name(key='value')]<|tool_call_end|>
    GRANITE = "granite"  # <|tool_call|>[{"name": ..., "arguments": {...}}]
    GIGACHAT = "gigachat"  # <|function_call|>{"name": ..., "arguments": {...}}, one
    PHI = "phi"  # <|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>
    NEMOTRON = "nemotron"  # <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>
    TOOL_CALLS = "tool-calls"  # <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>, or line by line
    HARMONY = "harmony"  # <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
    DEEPSEEK = (
        "deepseek"  # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, in marks around all
    )
    DEEPSEEK_R1 = "deepseek-r1"  # the same with function<｜tool▁sep｜>name, and {...} in a Markdown fence
    KIMI = "kimi"  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    MINIMAX = "minimax"  # <minimax:tool_call><invoke name="..."><parameter name="key">value</parameter>...
    SEED = "seed"  # <seed:tool_call><function=name><parameter=key>value</parameter></function>...
    COHERE = "cohere"  # <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>
    JSON = "json"  # {"name": ..., "arguments": {...}} as the whole text, or a list of such


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup in a text besides the answer proper, as known to the worker that generated it.

    calls     syntax of its tool calls
    thinking  the marks around the model's reasoning
    opened    the prompt ends with the opening mark
    closed    the prompt ends with the closing mark: the model is not to reason; not stored
    """

    calls: CallFormat | None = None
    thinking: tuple[str, str] | None = None
    opened: bool = False
    closed: bool = field(default=False, compare=False)

    def values(self) -> JsonObject:
        """Return the JSON object that a row stores."""
        return {
            "calls": None if self.calls is None else str(self.calls),
            "thinking": None if self.thinking is None else list(self.thinking),
            "opened": self.opened,
        }

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Parse the JSON object of a row; None if this version cannot read it."""
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
