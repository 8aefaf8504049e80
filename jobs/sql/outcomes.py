"""The end of a claimed job as a worker writes it: its values, and the fenced statement."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Double, bindparam, func, update

from nightmill.jobs.base.contract import JobState, Markup, StopReason
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.sql import logprobs
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.tables import JobRow


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
    """The values that the table of log-probabilities keeps of a job, by number."""
    beside = {logprobs.OF_PROMPT: outcome.prompt_logprobs, logprobs.TOKEN_IDS: outcome.token_ids}
    return dict(enumerate(outcome.logprobs)) | beside


def cost_values(gpu_seconds: float | None, energy_joules: float | None) -> dict[str, Any]:
    """Return the parameters by which a statement adds to what a job cost."""
    return {"new_gpu_seconds": gpu_seconds, "new_energy_joules": energy_joules}


def finish_values(outcome: Outcome, worker_id: str, now: datetime) -> dict[str, Any]:
    """Return the parameters of `FINISH` for an outcome."""
    error = outcome.error
    if error is None and outcome.stop_reason is StopReason.DEADLINE:
        error = f"the deadline passed after {outcome.completion_tokens} tokens"
    if error is None and outcome.stop_reason is StopReason.BUDGET:
        error = f"a limit of its batch was met after {outcome.completion_tokens} tokens"
    return {
        "job_id": outcome.job_id,
        "job_attempt": outcome.attempt,
        "job_worker": worker_id,
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
        "text_seed": outcome.seed,
        "new_markup": None if outcome.markup is None else outcome.markup.values(),
        "new_error": error,
        "new_finished_at": now,
    } | cost_values(outcome.gpu_seconds, outcome.energy_joules)


Cost = tuple[float, float | None]
"""GPU seconds, and joules if they are known."""


def _added(name: str) -> Any:
    """Return a column with what an outcome adds to it; attempts before it, and its first text, cost, too."""
    column, new = getattr(JobRow, name), bindparam(f"new_{name}", type_=Double)
    return func.coalesce(column + new, new, column)


FINISH = (
    update(JobRow)
    .where(
        JobRow.id == bindparam("job_id"),
        JobRow.state == JobState.RUNNING,
        JobRow.attempt == bindparam("job_attempt"),
        JobRow.worker == bindparam("job_worker"),
    )
    .values(
        state=bindparam("new_state"),
        stop_reason=bindparam("new_stop_reason"),
        text=bindparam("new_text"),
        prompt_tokens=bindparam("new_prompt_tokens"),
        completion_tokens=bindparam("new_completion_tokens"),
        cached_tokens=bindparam("new_cached_tokens"),
        reasoning_tokens=bindparam("new_reasoning_tokens"),
        arithmetic=bindparam("new_arithmetic"),
        prompt_digest=bindparam("new_prompt_digest"),
        markup=bindparam("new_markup"),
        reused_from=bindparam("new_reused_from"),
        seed=func.coalesce(bindparam("text_seed", type_=JobRow.seed.type), JobRow.seed),
        gpu_seconds=_added("gpu_seconds"),
        energy_joules=_added("energy_joules"),
        error=bindparam("new_error"),
        finished_at=bindparam("new_finished_at"),
    )
)
"""Ends a running job that this worker still owns."""
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
