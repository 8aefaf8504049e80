"""Queueing of ended rows of a batch again with other parameters: which rows, and which parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.request.fields import FIELDS, FieldKind, unknown_field
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.requeueing import Requeued
from nightmill.jobs.sql.tables import JobRow

_SHAPE_THE_RESULT = ("n", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
CHANGEABLE = tuple(
    name
    for name in GenerationParams.model_fields
    if FIELDS[name].kind in (FieldKind.INTEGER, FieldKind.NUMBER) and name not in _SHAPE_THE_RESULT
)
"""Parameters that rows may get when they are queued again: limits, and the numbers of sampling."""
_REASONS = (StopReason.ERROR, StopReason.DEADLINE, StopReason.BUDGET, StopReason.CANCELLED)
_ALLOWED = {
    "state": (JobState.FAILED, JobState.CANCELLED),
    "stop_reason": _REASONS,
    "code": _REASONS,
}
"""Fields by which rows may be chosen, with their values.

A row that can run again has its stop reason as the code of its error.
"""
_COLUMNS = {"state": JobRow.state, "stop_reason": JobRow.stop_reason, "code": JobRow.stop_reason}
Where = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class QueuedAgain:
    """The outcome of queueing rows of a batch again."""

    rows: int  # queued
    refused: int = 0  # rows that cannot have the new parameters, and stay as they are
    reason: str | None = None  # of the first of them


def announced(groups: Iterable[Requeued], announcer: Announcer) -> QueuedAgain:
    """Queue all groups and send their messages."""
    rows = refused = 0
    reason: str | None = None
    room: int | None = None
    for group in groups:
        rows, refused = rows + len(group.rows), refused + group.refused
        reason = reason or group.reason
        if group.rows:
            room = announcer.announce_first(group.groups, room)
    return QueuedAgain(rows, refused, reason)


def check_max_tokens(value: object) -> int:
    """Check a new limit; raises InvalidParameterError."""
    return GenerationParams.parse({"max_tokens": value}).max_tokens


def check_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters; raises InvalidParameterError for one that may not change, or its value."""
    given = {name: value for name, value in changes.items() if value is not None}
    for name in given:
        if name not in CHANGEABLE:
            why = None
            if name in GenerationParams.model_fields:
                why = f"may not change when rows are queued again; {', '.join(CHANGEABLE)} may"
            raise unknown_field(name, CHANGEABLE, why)
    # A row's own parameters are checked with them later; `max_tokens` belongs to the row.
    GenerationParams.parse({"max_tokens": 1_000_000, **given})
    return given


def conditions_of(where: Where) -> list[Any]:
    """Return the conditions for the rows of `where`; raises InvalidParameterError."""
    conditions: list[Any] = []
    for name, values in where.items():
        if name not in _ALLOWED:
            said = f"where: rows cannot be chosen by {name!r}; use {', '.join(_ALLOWED)}"
            raise InvalidParameterError(said, field="where")
        chosen = [values] if isinstance(values, str) else list(values)
        for value in chosen:
            if value not in _ALLOWED[name]:
                allowed = " or ".join(map(str, _ALLOWED[name]))
                raise InvalidParameterError(
                    f"where: {name} must be {allowed} (got {value!r}): rows that succeeded keep their "
                    "results, and those that were cut go on with batch extend",
                    field="where",
                )
        conditions.append(_COLUMNS[name].in_([str(value) for value in chosen]))
    return conditions
