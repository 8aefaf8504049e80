"""The end of a claimed job as a worker writes it: its values, and the fenced statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Double,
    Integer,
    String,
    Text,
    bindparam,
    cast,
    column,
    func,
    literal_column,
    update,
)

from nightmill.jobs.base.contract import JobState, Markup, StopReason, storable
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.sql import logprobs
from nightmill.jobs.sql.json_columns import dump_json
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.tables import JobRow
from nightmill.jobs.sql.types import UtcDateTime


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a claimed job, as written by ResultWriter."""

    job_id: str
    attempt: int
    stop_reason: StopReason
    text: str  # of the first answer
    prompt_tokens: int
    completion_tokens: int  # of all answers
    error: str | None = None
    arithmetic: str | None = None  # what computed the text; None if nothing was computed
    prompt_digest: str | None = None  # of the prompt's token ids
    markup: Markup | None = None  # markup of reasoning and tool calls
    answers: tuple[Answer, ...] = ()  # all answers, if the job asked for several
    logprobs: tuple[bytes | None, ...] = ()  # of the answers in order, if requested
    prompt_logprobs: bytes | None = None  # if requested
    token_ids: bytes | None = None  # of prompt and answers (`jobs.reply.token_ids`), if requested
    embedding: bytes | None = None  # float32 (`jobs.reply.embeddings`), if requested
    cached_tokens: int = 0  # tokens of the prompt taken from the cache
    reasoning_tokens: int = 0  # reasoning tokens of all answers
    reused_from: str | None = None  # the job that the text was computed for, if another's
    seed: int | None = None  # the seed of such a text
    drawn: tuple[int, ...] = ()  # its tokens (see SavedTokens), if an answer was cut
    saved: SavedTokens | None = None  # the same with what they depend on, to be kept
    gpu_seconds: float | None = None  # its share of the steps that computed it; None: nothing was
    energy_joules: float | None = None  # the same in joules; None also if the device does not tell


def told(outcome: Outcome) -> dict[int, bytes | None]:
    """The values that the table of log-probabilities keeps of a job, by number; of most there are none."""
    if not outcome.logprobs and outcome.prompt_logprobs is None and outcome.token_ids is None:
        return {}
    beside = {logprobs.OF_PROMPT: outcome.prompt_logprobs, logprobs.TOKEN_IDS: outcome.token_ids}
    return dict(enumerate(outcome.logprobs)) | beside


def cost_values(gpu_seconds: float | None, energy_joules: float | None) -> dict[str, Any]:
    """Return the parameters by which a statement adds to what a job cost."""
    return {"new_gpu_seconds": gpu_seconds, "new_energy_joules": energy_joules}


def error_of(outcome: Outcome) -> str | None:
    """Return what the row says of why there is no whole answer."""
    error = outcome.error
    if error is None and outcome.stop_reason is StopReason.DEADLINE:
        error = f"the deadline passed after {outcome.completion_tokens} tokens"
    if error is None and outcome.stop_reason is StopReason.BUDGET:
        error = f"a limit of its batch was met after {outcome.completion_tokens} tokens"
    return error


def finish_values(outcome: Outcome, now: datetime) -> dict[str, Any]:
    """Return the new values of the row of one outcome, each with `new_` before its column's name."""
    return {
        "new_state": outcome.stop_reason.state,
        "new_stop_reason": outcome.stop_reason,
        "new_text": outcome.text,
        "new_prompt_tokens": outcome.prompt_tokens,
        "new_completion_tokens": outcome.completion_tokens,
        "new_cached_tokens": outcome.cached_tokens,
        "new_reasoning_tokens": outcome.reasoning_tokens,
        "new_arithmetic": outcome.arithmetic,
        "new_prompt_digest": outcome.prompt_digest,
        "new_reused_from": outcome.reused_from,
        "new_markup": None if outcome.markup is None else outcome.markup.values(),
        "new_error": error_of(outcome),
        "new_finished_at": now,
    } | cost_values(outcome.gpu_seconds, outcome.energy_joules)


Cost = tuple[float, float | None]
"""GPU seconds, and joules if they are known."""


def _sum(name: str, new: Any) -> Any:
    """Return a column with what an outcome adds to it; attempts before it, and its first text, cost, too."""
    before = getattr(JobRow, name)
    return func.coalesce(before + new, new, before)


def _added(name: str) -> Any:
    return _sum(name, bindparam(f"new_{name}", type_=Double))


# Outcomes are one parameter, a JSON list: the statement is parsed, planned and executed once for all of them.
_FENCE = {"job_id": String(), "job_attempt": Integer()}
_COPIED = {
    name: getattr(JobRow, name).type
    for name in (
        *("state", "stop_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"),
        *("prompt_digest", "reused_from"),
    )
} | {"text": Text(), "arithmetic": Text(), "error": Text(), "markup": JSON(none_as_null=True)}
_MERGED = {"text_seed": BigInteger(), "new_gpu_seconds": Double(), "new_energy_joules": Double()}


def _finishing(*, sqlite: bool) -> Any:
    """Build the UPDATE of many jobs; its parameters are `ended`, `job_worker` and `new_finished_at`."""
    ended = bindparam("ended", type_=Text())
    new: dict[str, Any]
    if sqlite:
        each = func.json_each(ended).table_valued("value", name="each_ended")
        new = {
            name: func.json_extract(each.c.value, literal_column(f"'$.{name}'"), type_=type_)
            for name, type_ in (_FENCE | _COPIED | _MERGED).items()
        }
    else:
        columns = [column(name, type_) for name, type_ in (_FENCE | _COPIED | _MERGED).items()]
        rows = func.json_to_recordset(cast(ended, JSON())).table_valued(*columns)
        new = dict(rows.render_derived(with_types=True).c.items())
    return (
        update(JobRow)
        .where(
            JobRow.id == new["job_id"],
            JobRow.state == JobState.RUNNING,
            JobRow.attempt == new["job_attempt"],
            # Written so that the jobs are looked up by id: of a worker's running jobs there are thousands.
            JobRow.worker.concat("") == bindparam("job_worker"),
        )
        .values(
            {name: new[name] for name in _COPIED}
            | {
                "seed": func.coalesce(new["text_seed"], JobRow.seed),
                "gpu_seconds": _sum("gpu_seconds", new["new_gpu_seconds"]),
                "energy_joules": _sum("energy_joules", new["new_energy_joules"]),
                "finished_at": bindparam("new_finished_at", type_=UtcDateTime()),
            }
        )
    )


# As texts: of a member of an enumeration JSON asks Python for its value.
_REASONS = {reason: str(reason) for reason in StopReason}
_STATES = {reason: str(reason.state) for reason in StopReason}
_FINISH_SQLITE = _finishing(sqlite=True)
_FINISH_POSTGRESQL = _finishing(sqlite=False)


def finish(connection: Connection, outcomes: Sequence[Outcome], worker_id: str, now: datetime) -> int:
    """End running jobs that this worker still owns; returns their number."""
    used = {outcome.arithmetic for outcome in outcomes if outcome.arithmetic is not None}
    names = {name: storable(name) for name in used}
    ended = [
        {
            "job_id": outcome.job_id,
            "job_attempt": outcome.attempt,
            "state": _STATES[outcome.stop_reason],
            "stop_reason": _REASONS[outcome.stop_reason],
            "text": storable(outcome.text),
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "cached_tokens": outcome.cached_tokens,
            "reasoning_tokens": outcome.reasoning_tokens,
            "prompt_digest": outcome.prompt_digest,
            "reused_from": outcome.reused_from,
            "arithmetic": None if outcome.arithmetic is None else names[outcome.arithmetic],
            "error": error_of(outcome),
            "markup": None if outcome.markup is None else outcome.markup.values(),
            "text_seed": outcome.seed,
            "new_gpu_seconds": outcome.gpu_seconds,
            "new_energy_joules": outcome.energy_joules,
        }
        for outcome in outcomes
    ]
    statement = _FINISH_SQLITE if connection.dialect.name == "sqlite" else _FINISH_POSTGRESQL
    given = {"ended": dump_json(ended), "job_worker": worker_id, "new_finished_at": now}
    return connection.execute(statement, given).rowcount


ADD_COST = (
    update(JobRow)
    .where(
        JobRow.id == bindparam("job_id"),
        JobRow.state == JobState.QUEUED,
        JobRow.attempt == bindparam("job_attempt"),
    )
    .values(gpu_seconds=_added("gpu_seconds"), energy_joules=_added("energy_joules"))
)
"""Adds to a job that was handed back what its attempt cost."""
OF_THE_TEXT = (
    *("text", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"),
    *("arithmetic", "prompt_digest", "markup", "reused_from"),
)
"""Columns that belong to a text."""
ADDED = ("gpu_seconds", "energy_joules")
"""Columns to which an outcome adds."""
