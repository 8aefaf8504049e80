"""From what a caller says to a row of `jobs`: every check that can be made at enqueue is made here."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, ValidationError

from nightmill.jobs.contract import MAX_SEED, GenerationParams, JobState, JsonObject, Prompt, unstorable
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError
from nightmill.jobs.sentences import sentence


class JobSettings(TypedDict, total=False):
    """The keywords of enqueue: the fields of GenerationParams, then those of Options."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool

    model: str | None
    batch: str | None
    custom_id: str | None
    priority: int
    deadline: datetime | timedelta | None
    scheduled_at: datetime | timedelta | None
    idempotency_key: str | None
    metadata: Mapping[str, Any] | None
    max_attempts: int | None


PARAMETERS = frozenset(GenerationParams.model_fields)
DEFAULT_PRIORITY = 5
HIGHEST_PRIORITY = 9

# In JSON; behind an even number of backslashes, or else it is a backslash and five letters.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/@-]{0,199}")


class ChatMessage(BaseModel):
    """One message of a chat prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say about a job besides its prompt and parameters; checked on creation."""

    model: str | None = None
    batch: str | None = None
    custom_id: str | None = None
    priority: int = DEFAULT_PRIORITY
    deadline: datetime | timedelta | None = None
    scheduled_at: datetime | timedelta | None = None
    idempotency_key: str | None = None
    metadata: Mapping[str, Any] | None = None
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        _check_text("batch", self.batch, 200)
        _check_text("custom_id", self.custom_id, 512)
        _check_text("idempotency_key", self.idempotency_key, 255)
        if self.model is not None and not (isinstance(self.model, str) and _MODEL_NAME.fullmatch(self.model)):
            raise _bad("model", "must be a name of letters, digits and . _ : + / @ -", self.model)
        _check_integer("priority", self.priority, 0, HIGHEST_PRIORITY)
        if self.max_attempts is not None:
            _check_integer("max_attempts", self.max_attempts, 1, 100)
        for name in ("deadline", "scheduled_at"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, datetime | timedelta):
                raise _bad(name, "must be a datetime or a timedelta", value)
            if isinstance(value, datetime) and value.tzinfo is None:
                raise _bad(name, "must have a time zone, e.g. datetime.now(timezone.utc)", value)
        if self.metadata is not None:
            _check_metadata(self.metadata)


OPTIONS = frozenset(Options.__slots__)


def build_row(
    job_id: str,
    prompt: Prompt,
    params: GenerationParams,
    options: Options,
    now: datetime,
    default_attempts: int,
) -> dict[str, Any]:
    """The row to insert. Draws a seed where `params` has none. Raises InvalidPromptError.

    Every row has the same keys, so that many can go into one statement.
    """
    text, messages = check_prompt(prompt)
    return {
        "id": job_id,
        "batch": options.batch,
        "custom_id": options.custom_id,
        "model": options.model,
        "prompt": text,
        "messages": messages,
        "params": params.model_dump(mode="json", exclude={"seed"}),
        "seed": secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
        "state": JobState.QUEUED.value,
        "attempt": 0,
        "failures": 0,
        "max_attempts": options.max_attempts or default_attempts,
        "priority": options.priority,
        # Sent with the commit that makes the row visible. A job for later is sent by a worker's sweep.
        "sent_at": None if options.scheduled_at is not None else now,
        "idempotency_key": options.idempotency_key,
        "fingerprint": _fingerprint(text, messages, params, options) if options.idempotency_key else None,
        "metadata": dict(options.metadata) if options.metadata else None,
        "created_at": now,
        "scheduled_at": moment("scheduled_at", options.scheduled_at, now),
        "deadline_at": moment("deadline", options.deadline, now),
    }


def check_prompt(prompt: Prompt) -> tuple[str | None, list[JsonObject] | None]:
    """A plain prompt as (text, None), a chat as (None, messages); raises InvalidPromptError."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPromptError("prompt: is empty", field="prompt")
        if problem := unstorable(prompt):
            raise InvalidPromptError(f"prompt: {problem}", field="prompt")
        return prompt, None
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
        raise InvalidPromptError(
            f"prompt: must be a text or a list of messages, not {type(prompt).__name__}", field="prompt"
        )
    messages = [_check_message(index, message) for index, message in enumerate(prompt)]
    if not messages:
        raise InvalidPromptError("messages: the list is empty", field="messages")
    return None, messages


def _check_message(index: int, message: Any) -> JsonObject:
    where = f"messages[{index}]"
    try:
        checked = ChatMessage.model_validate(dict(message) if isinstance(message, Mapping) else message)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([where, *(str(part) for part in first["loc"])])
        said = "is not supported" if first["type"] == "extra_forbidden" else sentence(first)
        raise InvalidPromptError(f"{field}: {said}", field=field) from None
    if problem := unstorable(checked.content):
        raise InvalidPromptError(f"{where}.content: {problem}", field=f"{where}.content")
    return {"role": checked.role, "content": checked.content}


def _fingerprint(
    text: str | None, messages: list[JsonObject] | None, params: GenerationParams, options: Options
) -> str:
    content = {
        "prompt": text,
        "messages": messages,
        "params": params.model_dump(mode="json"),
        "model": options.model,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def moment(name: str, value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The point in time that `value` names, in UTC; raises InvalidParameterError where there is none."""
    if value is None:
        return None
    try:
        return (now + value if isinstance(value, timedelta) else value).astimezone(UTC)
    except OverflowError:
        raise _bad(name, "lies beyond the calendar", value) from None


def deadline_moment(value: datetime | timedelta | None, now: datetime) -> datetime | None:
    """As `moment`, for a deadline; raises InvalidParameterError where it has passed."""
    ends = moment("deadline", value, now)
    if ends is not None and ends <= now:
        raise InvalidParameterError(
            f"deadline: {ends.isoformat()} has passed (it is {now.isoformat()}): give a later one",
            field="deadline",
        )
    return ends


def _bad(name: str, rule: str, value: object) -> InvalidParameterError:
    return InvalidParameterError(f"{name}: {rule} (got {str(value)[:100]!r})", field=name)


def _check_text(name: str, value: object, longest: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise _bad(name, f"must be a text of 1 to {longest} characters", value)
    if problem := unstorable(value):
        raise InvalidParameterError(f"{name}: {problem}", field=name)


def _check_integer(name: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise _bad(name, f"must be a whole number from {lowest} to {highest}", value)


def _check_metadata(value: object) -> None:
    if not isinstance(value, Mapping):
        raise _bad("metadata", "must be a mapping that JSON can hold", value)
    try:
        encoded = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(f"metadata: is not JSON: {error}", field="metadata") from None
    if problem := unstorable(_ESCAPED_NUL.sub("\\1\0", encoded)):
        raise InvalidParameterError(f"metadata: {problem}", field="metadata")
