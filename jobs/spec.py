"""A job as it is asked for: every door parses into `JobSpec`, which makes every check of enqueue.

The fields of GenerationParams and the options of JobSpec are the one table of what may be said about a job.
What a call may be given, the columns of tables and the options of commands follow from `FIELDS`.
"""

import difflib
import hashlib
import json
import secrets
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Self, TypedDict, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from nightmill.jobs import checks
from nightmill.jobs.constrained import FORMS, constrained_by
from nightmill.jobs.contract import (
    AS_USUAL,
    MAX_SEED,
    Constrained,
    GenerationParams,
    JobState,
    JsonObject,
    Prompt,
    Rendering,
    TokenId,
)
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, RowCode
from nightmill.jobs.prompts import check_messages, check_text, check_token_ids, is_id, json_type

HIGHEST_PRIORITY = 9


class BatchSettings(TypedDict, total=False):
    """Keywords of submit_batch, for all its rows. None counts as not given."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None
    stop_token_ids: int | Sequence[int] | None
    min_tokens: int | None
    n: int | None
    response_format: Mapping[str, Any] | type[BaseModel] | None
    json_schema: Mapping[str, Any] | type[BaseModel] | None
    regex: str | None
    choice: str | Sequence[str] | None
    grammar: str | None
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


_DEFAULTS = GenerationParams()

# -- the description -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is said about a job. One without a prompt holds the defaults of others."""

    text: str | None = None
    messages: list[JsonObject] | None = None
    token_ids: list[int] | None = None
    params: GenerationParams = _DEFAULTS
    constrained: Constrained | None = None
    """What the answer must be, in whichever of FORMS it was said."""

    # Each with its check, and what it is.
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

    @classmethod
    def defaults(cls, settings: Mapping[str, Any], known: Iterable[str] = ()) -> Self:
        """What holds for jobs that do not say otherwise; raises InvalidParameterError.

        known  the fields that may be given, if not all
        """
        allowed = frozenset(known) or FIELDS.keys()
        if foreign := [name for name in settings if name not in allowed]:
            raise unknown_field(foreign[0], allowed)
        return cls().updated(settings)

    @classmethod
    def parse(cls, item: "Prompt | Mapping[str, Any]", defaults: "JobSpec | None" = None) -> "JobSpec":
        """A prompt, or a mapping with `prompt` or `messages` and fields of its own, over `defaults`.

        A prompt is a text, a list of token ids, or a list of messages.

        None counts as not given. Raises InvalidPromptError and InvalidParameterError, which name the field.
        """
        base = defaults or cls()
        if isinstance(item, str) or not isinstance(item, Mapping):
            return base._but(_prompt(item))._checked()
        given = {name: value for name, value in item.items() if value is not None}
        prompt, messages = given.pop("prompt", None), given.pop("messages", None)
        if prompt is not None and messages is not None:
            raise InvalidPromptError("prompt: give either prompt or messages, not both", field="prompt")
        if prompt is None and messages is None:
            raise InvalidPromptError(
                "prompt: is missing; give a prompt (a text) or messages (a list)",
                field="prompt",
                code=RowCode.MISSING_FIELD,
            )
        said = _prompt(prompt) if messages is None else {"text": None, "messages": check_messages(messages)}
        return (base.updated(given, said) if given else base._but(said))._checked()

    @property
    def prompt(self) -> Prompt | None:
        """The text, the token ids, or the messages."""
        given = (said for said in (self.text, self.token_ids, self.messages) if said is not None)
        return next(given, None)

    @property
    def rendering(self) -> Rendering | None:
        """How the messages become a prompt, unless that is as usual. It says nothing of other prompts."""
        if self.messages is None:
            return None
        continues = self.continue_final_message
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        made = Rendering(dict(self.chat_template_kwargs or {}), opens, continues)
        return None if made == AS_USUAL else made

    def row(self, job_id: str, now: datetime, default_attempts: int) -> dict[str, Any]:
        """The row of `jobs`, queued. Draws a seed unless one is given.

        Every row has the same keys, so that many can go into one statement. Raises InvalidParameterError for
        a time beyond the calendar.
        """
        params, rendering = self.params, self.rendering
        return {
            "id": job_id,
            "batch": self.batch,
            "custom_id": self.custom_id,
            "model": self.model,
            "prompt": self.text,
            "prompt_ids": self.token_ids,
            "messages": self.messages,
            "rendering": None if rendering is None else rendering.values(),
            "params": params.stored(),
            "constrained": None if self.constrained is None else self.constrained.values(),
            "seed": secrets.randbits(MAX_SEED.bit_length()) if params.seed is None else params.seed,
            "state": JobState.QUEUED.value,
            "attempt": 0,
            "failures": 0,
            "max_attempts": self.max_attempts or default_attempts,
            "priority": self.priority,
            # Sent with the commit that makes the row visible. A job for later is sent by a worker's sweep.
            "sent_at": None if self.scheduled_at is not None else now,
            "idempotency_key": self.idempotency_key,
            "fingerprint": self._fingerprint() if self.idempotency_key else None,
            "metadata": dict(self.metadata) if self.metadata else None,
            "created_at": now,
            "scheduled_at": moment("scheduled_at", self.scheduled_at, now),
            "deadline_at": moment("deadline", self.deadline, now),
        }

    def updated(self, settings: Mapping[str, Any], said: Mapping[str, Any] | None = None) -> Self:
        """With these fields in place of its own; `said` is checked already. Raises InvalidParameterError."""
        params: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        others = dict(said or {})
        for name, value in settings.items():
            if value is None:
                continue
            if name in PARAMETERS:
                params[name] = value
            elif name in FORMS:
                forms[name] = value
            else:
                check_option(name, value)
                others[name] = value
        if params:
            others["params"] = GenerationParams.parse(vars(self.params) | params)
        if forms:
            others["constrained"] = constrained_by(forms)
        made = self._but(others)
        if made.constrained is not None and made.params.ignore_eos:
            raise InvalidParameterError(
                "ignore_eos: contradicts what the answer must be, which says where it ends; give one of them",
                field="ignore_eos",
            )
        return made

    def _but(self, values: Mapping[str, Any]) -> Self:
        """With other values; `dataclasses.replace` takes ten times as long, and a night has 100,000 rows."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **values)
        return made

    def _checked(self) -> Self:
        """Itself, if what it says of the chat goes together with the chat; raises InvalidRequestError."""
        if not self.continue_final_message or self.messages is None:
            return self
        if self.add_generation_prompt:
            raise InvalidParameterError(
                "add_generation_prompt: contradicts continue_final_message, which opens no other message; "
                "give one of them",
                field="add_generation_prompt",
            )
        if (role := self.messages[-1]["role"]) != "assistant":
            raise InvalidParameterError(
                f"continue_final_message: the last message must be the assistant's, not the {role}'s: "
                "add one with what the answer begins with",
                field="continue_final_message",
            )
        return self

    def _fingerprint(self) -> str:
        content: dict[str, Any] = {
            "prompt": self.text,
            "messages": self.messages,
            "params": self.params.stored() | {"seed": self.params.seed},
            "model": self.model,
        }
        if self.constrained is not None:
            content["constrained"] = self.constrained.values()
        if self.token_ids is not None:
            content["prompt_ids"] = self.token_ids
        if (rendering := self.rendering) is not None:
            content["rendering"] = rendering.values()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": check_text(prompt), "messages": None}
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidPromptError(
            f"prompt: must be a text, a list of messages or of token ids, not {type(prompt).__name__}",
            field="prompt",
        )
    items = list(prompt)
    if not items:
        raise InvalidPromptError("prompt: is empty", field="prompt")
    if is_id(items[0]):
        return {"text": None, "token_ids": check_token_ids(items)}
    if not isinstance(items[0], Mapping):
        said = f"prompt[0]: must be a token id (a whole number) or a message, not {json_type(items[0])}"
        raise InvalidPromptError(said, field="prompt[0]")
    return {"text": None, "messages": check_messages(items)}


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
    if why is None:
        close = difflib.get_close_matches(str(name), known, n=1)
        why = f"did you mean {close[0]}?" if close else f"remove it; known are {', '.join(known)}"
    said = f"{name}: is not supported: {why}"
    return InvalidParameterError(said, field=str(name), code=RowCode.UNSUPPORTED_FIELD)


def moment(name: str, value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The point in time that `value` names, in UTC; raises InvalidParameterError if there is none."""
    if value is None:
        return None
    try:
        return (now + value if isinstance(value, timedelta) else value).astimezone(UTC)
    except OverflowError:
        said = f"{name}: lies beyond the calendar (got {str(value)!r})"
        raise InvalidParameterError(said, field=name) from None


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


# -- the table of fields -------------------------------------------------------------------------


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


_KINDS: dict[Any, Kind] = {
    int: Kind.INTEGER,
    float: Kind.NUMBER,
    bool: Kind.FLAG,
    str: Kind.TEXT,
    tuple[str, ...]: Kind.TEXTS,
    tuple[TokenId, ...]: Kind.INTEGERS,
    datetime: Kind.MOMENT,
    Mapping[str, Any]: Kind.OBJECT,
}


class Field(NamedTuple):
    """What may be said about a job, besides its prompt."""

    kind: Kind
    says: str
    default: Any


def _kind(hint: Any) -> Kind:
    return _KINDS[get_args(hint)[0] if isinstance(hint, types.UnionType) else hint]


PARAMETERS = frozenset(GenerationParams.model_fields)
_OPTIONS = {
    name: (*get_args(hint), getattr(JobSpec, name))
    for name, hint in get_type_hints(JobSpec, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_CHECKS: dict[str, checks.Check] = {name: check for name, (_, check, _, _) in _OPTIONS.items()}
FIELDS = (
    {
        name: Field(_kind(field.annotation), field.description or "", field.default)
        for name, field in GenerationParams.model_fields.items()
    }
    | {name: Field(_kind(form.type), form.says, None) for name, form in FORMS.items()}
    | {name: Field(_kind(hint), says, default) for name, (hint, _, says, default) in _OPTIONS.items()}
)
"""By name: first the parameters, then the forms of saying what the answer must be, then the options."""
OF_A_BATCH = frozenset(BatchSettings.__annotations__)
"""What may be said of the rows of a batch together."""
