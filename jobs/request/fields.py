"""The table of all fields of a job besides its prompt: parameters, constraints, tools, options.

The keywords of calls, the columns of tables and the options of commands follow from `FIELDS`.
"""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from nightmill.jobs.base.times import on_calendar
from nightmill.jobs.errors import InvalidParameterError, RowCode
from nightmill.jobs.request import checks
from nightmill.jobs.request.parameters import DEFAULTS, GenerationParams, TokenId
from nightmill.jobs.request.reuse import Reuse
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.request.tools import TOOL_KEYS

HIGHEST_PRIORITY = 9
INTERACTIVE = 10
"""The priority of interactive jobs, for which workers reserve slots. It is above every priority that a caller
may set; only `JobSpec.as_interactive` assigns it."""


class BatchSettings(TypedDict, total=False):
    """Keywords of submit_batch, for all rows of the batch. None counts as not given."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None
    stop_token_ids: int | Sequence[int] | None
    min_tokens: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    bad_words: str | Sequence[str] | None
    logprobs: int | None
    echo: bool | None
    score: str | Sequence[str] | None
    include_stop_str_in_output: bool | None
    prompt_logprobs: int | None
    return_token_ids: bool | None
    truncate_prompt_tokens: int | None
    max_reasoning_tokens: int | None
    reasoning_effort: str | None
    embed: bool | None
    dimensions: int | None
    pooling: str | None
    rerank: str | None
    instruction: str | None
    n: int | None
    response_format: Mapping[str, Any] | type[BaseModel] | None
    json_schema: Mapping[str, Any] | type[BaseModel] | None
    regex: str | None
    choice: str | Sequence[str] | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    priority: int | None
    max_attempts: int | None
    reuse: str | None
    model: str | None
    scheduled_at: datetime | timedelta | None
    deadline: datetime | timedelta | None


class JobSettings(BatchSettings, total=False):
    """Keywords of enqueue."""

    batch: str | None
    custom_id: str | None
    idempotency_key: str | None
    metadata: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a job besides prompt and parameters, each with its check and its sentence of help."""

    reasoning_effort: Annotated[
        str | None,
        checks.effort,
        "How much the model reasons: none, minimal, low, medium, high, as far as its template knows.",
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        checks.template_variables,
        "Further variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ] = None
    add_generation_prompt: Annotated[
        bool | None, checks.flag, "Open the message that the model is to write; true for chats by default."
    ] = None
    continue_final_message: Annotated[
        bool, checks.flag, "Continue the last message, which must be the assistant's."
    ] = False
    model: Annotated[str | None, checks.model_name, "Model that must serve it; any by default."] = None
    batch: Annotated[str | None, checks.text(200), "Name of the batch to put it in."] = None
    custom_id: Annotated[str | None, checks.text(512), "Your own id, which the result repeats."] = None
    priority: Annotated[int, checks.whole_number(0, HIGHEST_PRIORITY), "0 to 9, higher is sooner."] = 5
    scheduled_at: Annotated[
        datetime | timedelta | None,
        checks.moment,
        "When to begin: 01:00 (the next one), 2026-11-22T01:00, or 2h from now.",
    ] = None
    deadline: Annotated[
        datetime | timedelta | None,
        checks.moment,
        "When to end: 06:00 (the next one after the begin), 2026-11-22T06:00, or 8h.",
    ] = None
    idempotency_key: Annotated[
        str | None, checks.text(255), "A second enqueue with this key returns the first job."
    ] = None
    metadata: Annotated[Mapping[str, Any] | None, checks.json_object, "A JSON object to keep with it."] = None
    max_attempts: Annotated[
        int | None,
        checks.whole_number(1, 100),
        "Deaths of a worker that ran it alone until it has failed [NIGHTMILL_MAX_ATTEMPTS].",
    ] = None
    reuse: Annotated[
        str | None,
        checks.one_of(*Reuse),
        "Take an earlier answer if there is one: exact (the same to the bit), or any to the same request.",
    ] = None


class FieldKind(StrEnum):
    """The type of a field, for sources that contain only text."""

    INTEGER = "integer"
    NUMBER = "number"
    FLAG = "flag"
    TEXT = "text"
    TEXTS = "texts"
    INTEGERS = "integers"
    MOMENT = "moment"
    OBJECT = "object"
    OBJECTS = "objects"


_LONGEST_NAME = 100  # characters of an unknown field that are compared and shown
_ALIKE = 0.8  # difflib's ratio; below it a suggestion misleads more often than it helps
_MOST_LISTED = 20  # known fields that are shown
_WHERE_LISTED = "docs/file-formats.md lists what there is"
_KINDS: dict[Any, FieldKind] = {
    int: FieldKind.INTEGER,
    float: FieldKind.NUMBER,
    bool: FieldKind.FLAG,
    str: FieldKind.TEXT,
    tuple[str, ...]: FieldKind.TEXTS,
    tuple[TokenId, ...]: FieldKind.INTEGERS,
    datetime: FieldKind.MOMENT,
    Mapping[str, Any]: FieldKind.OBJECT,
    Sequence[Mapping[str, Any]]: FieldKind.OBJECTS,
}


class Scope(StrEnum):
    """The part of a job that a field acts on."""

    PROMPT = "prompt"
    ANSWER = "answer"
    """The text after the model's reasoning, if its template marks reasoning."""
    BOTH = "prompt and answer"
    TEXT = "text"
    """Everything that the model generates, including its reasoning."""
    JOB = "job"


class Field(NamedTuple):
    """A field of a job besides its prompt."""

    kind: FieldKind
    says: str
    default: Any
    scope: Scope


def _kind(hint: Any) -> FieldKind:
    if get_origin(hint) is dict:
        return FieldKind.OBJECT
    return _KINDS[get_args(hint)[0] if isinstance(hint, types.UnionType) else hint]


PARAMETERS = frozenset(GenerationParams.model_fields)
_SCOPES = {
    Scope.ANSWER: ("stop", "include_stop_str_in_output", "min_tokens", "bad_words", *CONSTRAINT_FIELDS),
    Scope.BOTH: tuple(TOOL_KEYS),
    Scope.PROMPT: (
        "prompt_logprobs", "truncate_prompt_tokens", "reasoning_effort", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message",
    ),
    Scope.JOB: ("n", "score", "return_token_ids", "embed", "dimensions", "pooling", "rerank", "instruction"),
}  # fmt: skip
_SCOPE_OF = {name: scope for scope, names in _SCOPES.items() for name in names}
_OPTIONS = {
    name: (*get_args(hint), getattr(Options, name))
    for name, hint in get_type_hints(Options, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_CHECKS: dict[str, checks.Check] = {name: check for name, (_, check, _, _) in _OPTIONS.items()}
FIELDS = (
    {
        name: Field(
            _kind(field.annotation),
            field.description or "",
            getattr(DEFAULTS, name),
            _SCOPE_OF.get(name, Scope.TEXT),
        )
        for name, field in GenerationParams.model_fields.items()
    }
    | {
        name: Field(_kind(form.type), form.says, None, _SCOPE_OF[name])
        for name, form in CONSTRAINT_FIELDS.items()
    }
    | {name: Field(_kind(key.type), key.says, None, _SCOPE_OF[name]) for name, key in TOOL_KEYS.items()}
    | {
        name: Field(_kind(hint), says, default, _SCOPE_OF.get(name, Scope.JOB))
        for name, (hint, _, says, default) in _OPTIONS.items()
    }
)
"""All fields by name: parameters, constraints, tools, options."""
OF_A_BATCH = frozenset(BatchSettings.__annotations__)
"""Fields that may be set for all rows of a batch."""


def check_option(name: str, value: Any, shown: str | None = None) -> None:
    """Raise InvalidParameterError unless `name` is an option that takes this value. `shown`: its name."""
    check = _CHECKS.get(name)
    if check is None:
        raise unknown_field(name, FIELDS)
    try:
        check(value)
    except ValueError as error:
        raise InvalidParameterError(f"{shown or name}: {error}", field=shown or name) from None


def unknown_field(
    name: object, known: Iterable[str], why: str | None = None, *, otherwise: str | None = None
) -> InvalidParameterError:
    """Return the error for an unsupported field, with the reason `why` or a suggestion.

    otherwise  the suggestion where no known name is alike
    """
    known = sorted(known)
    # A foreign name may have megabytes, and the cost of a comparison grows with the length.
    name = str(name) if len(str(name)) <= _LONGEST_NAME else f"{str(name)[:_LONGEST_NAME]}..."
    if why is None:
        close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        listed = f"known are {', '.join(known)}" if len(known) <= _MOST_LISTED else _WHERE_LISTED
        why = f"did you mean {close[0]}?" if close else otherwise or f"remove it; {listed}"
    said = f"{name}: is not supported: {why}"
    return InvalidParameterError(said, field=name, code=RowCode.UNSUPPORTED_FIELD)


def moment(name: str, value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """Resolve `value` to a point in time in UTC; raises InvalidParameterError if it is beyond the
    calendar."""
    if value is None:
        return None
    try:
        wanted = (now + value if isinstance(value, timedelta) else value).astimezone(UTC)
    except (OverflowError, ValueError):  # ValueError: a naive time at the beginning of the calendar
        said = f"{name}: lies beyond the calendar (got {str(value)!r})"
        raise InvalidParameterError(said, field=name) from None
    return on_calendar(name, wanted)


def deadline_moment(value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """Check and resolve a deadline; raises InvalidParameterError if it has passed."""
    if value is not None:
        check_option("deadline", value)
    ends = moment("deadline", value, now)
    if ends is not None and ends <= now:
        raise InvalidParameterError(
            f"deadline: {ends.isoformat()} has passed (it is {now.isoformat()}): give a later one",
            field="deadline",
        )
    return ends
