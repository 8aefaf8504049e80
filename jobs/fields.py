"""The one table of what may be said about a job beside its prompt: parameters, forms of answers, options.

What a call may be given, the columns of tables and the options of commands follow from `FIELDS`.
"""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from nightmill.jobs import checks
from nightmill.jobs.constrained import FORMS
from nightmill.jobs.errors import InvalidParameterError, RowCode
from nightmill.jobs.parameters import DEFAULTS, GenerationParams, TokenId
from nightmill.jobs.tools import TOOL_KEYS
from nightmill.jobs.when import on_calendar

HIGHEST_PRIORITY = 9
INTERACTIVE = 10
"""The priority of jobs that somebody waits for, above all that can be asked for: workers have places for such
jobs alone. It is the doors' to give (`JobSpec.waited_for`), and no row's to ask for."""


class BatchSettings(TypedDict, total=False):
    """Keywords of submit_batch, for all its rows. None counts as not given."""

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
    model: str | None
    scheduled_at: datetime | timedelta | None
    deadline: datetime | timedelta | None


class JobSettings(BatchSettings, total=False):
    """The keywords of enqueue."""

    batch: str | None
    custom_id: str | None
    idempotency_key: str | None
    metadata: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may be said of a job beside its prompt and parameters: each with its check, and what it is."""

    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        checks.template_variables,
        "What a chat's template may look at, such as '{\"enable_thinking\": false}'.",
    ] = None
    add_generation_prompt: Annotated[
        bool | None, checks.flag, "Open the message that the model is to write; true for chats by default."
    ] = None
    continue_final_message: Annotated[
        bool, checks.flag, "The answer goes on with the last message, which must be the assistant's."
    ] = False
    model: Annotated[
        str | None, checks.model_name, "Name of the model that must serve it; any by default."
    ] = None
    batch: Annotated[str | None, checks.text(200), "Name of the batch to put it in."] = None
    custom_id: Annotated[str | None, checks.text(512), "A name of your own, to know the result by."] = None
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
        "Deaths of a worker that ran it alone, after which it has failed [NIGHTMILL_MAX_ATTEMPTS].",
    ] = None


class Kind(StrEnum):
    """What a field holds, for doors that have only text."""

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
_KINDS: dict[Any, Kind] = {
    int: Kind.INTEGER,
    float: Kind.NUMBER,
    bool: Kind.FLAG,
    str: Kind.TEXT,
    tuple[str, ...]: Kind.TEXTS,
    tuple[TokenId, ...]: Kind.INTEGERS,
    datetime: Kind.MOMENT,
    Mapping[str, Any]: Kind.OBJECT,
    Sequence[Mapping[str, Any]]: Kind.OBJECTS,
}


class Field(NamedTuple):
    """What may be said about a job, besides its prompt."""

    kind: Kind
    says: str
    default: Any


def _kind(hint: Any) -> Kind:
    if get_origin(hint) is dict:
        return Kind.OBJECT
    return _KINDS[get_args(hint)[0] if isinstance(hint, types.UnionType) else hint]


PARAMETERS = frozenset(GenerationParams.model_fields)
_OPTIONS = {
    name: (*get_args(hint), getattr(Options, name))
    for name, hint in get_type_hints(Options, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_CHECKS: dict[str, checks.Check] = {name: check for name, (_, check, _, _) in _OPTIONS.items()}
FIELDS = (
    {
        name: Field(_kind(field.annotation), field.description or "", getattr(DEFAULTS, name))
        for name, field in GenerationParams.model_fields.items()
    }
    | {name: Field(_kind(form.type), form.says, None) for name, form in FORMS.items()}
    | {name: Field(_kind(key.type), key.says, None) for name, key in TOOL_KEYS.items()}
    | {name: Field(_kind(hint), says, default) for name, (hint, _, says, default) in _OPTIONS.items()}
)
"""By name: the parameters, the forms of saying what the answer must be, what concerns tools, the options."""
OF_A_BATCH = frozenset(BatchSettings.__annotations__)
"""What may be said of the rows of a batch together."""


def check_option(name: str, value: Any) -> None:
    """Raise InvalidParameterError unless `name` is an option that takes this value."""
    check = _CHECKS.get(name)
    if check is None:
        raise unknown_field(name, FIELDS)
    try:
        check(value)
    except ValueError as error:
        raise InvalidParameterError(f"{name}: {error}", field=name) from None


def unknown_field(name: object, known: Iterable[str], why: str | None = None) -> InvalidParameterError:
    """The error for a field that is not taken: `why`, or which one may have been meant."""
    known = sorted(known)
    # A stranger's name may have megabytes, and comparing texts takes time and memory by their lengths.
    name = str(name) if len(str(name)) <= _LONGEST_NAME else f"{str(name)[:_LONGEST_NAME]}..."
    if why is None:
        close = difflib.get_close_matches(name, known, n=1)
        why = f"did you mean {close[0]}?" if close else f"remove it; known are {', '.join(known)}"
    said = f"{name}: is not supported: {why}"
    return InvalidParameterError(said, field=name, code=RowCode.UNSUPPORTED_FIELD)


def moment(name: str, value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The point in time that `value` names, in UTC; raises InvalidParameterError if there is none."""
    if value is None:
        return None
    try:
        wanted = (now + value if isinstance(value, timedelta) else value).astimezone(UTC)
    except (OverflowError, ValueError):  # the latter of a naive one at the beginning of the calendar
        said = f"{name}: lies beyond the calendar (got {str(value)!r})"
        raise InvalidParameterError(said, field=name) from None
    return on_calendar(name, wanted)


def deadline_moment(value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """As `moment`, for a deadline, which is checked; raises InvalidParameterError if it has passed."""
    if value is not None:
        check_option("deadline", value)
    ends = moment("deadline", value, now)
    if ends is not None and ends <= now:
        raise InvalidParameterError(
            f"deadline: {ends.isoformat()} has passed (it is {now.isoformat()}): give a later one",
            field="deadline",
        )
    return ends
