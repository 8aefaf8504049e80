"""Parsing of claimed rows for workers, tolerant of rows that clients of other versions wrote."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Text, cast

from nightmill.jobs.base.contract import KINDS_OF_ROWS, Constrained, JsonObject, Rendering, is_token_ids
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.checks import template_variables
from nightmill.jobs.request.parameters import DEFAULTS, MAX_SEED, GenerationParams
from nightmill.jobs.request.tools import check_read
from nightmill.jobs.sql.json_columns import load_json
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.tables import BATCH_CREATED_AT, JobRow

__all__ = ["CLAIMED", "Claim", "read_claim", "requested_at"]

log = logging.getLogger(__name__)

_REMEMBERED = 4096  # characters; longer parameters are those of one row


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this worker may run, until someone else claims it."""

    job_id: str
    attempt: int
    prompt: str | None
    messages: list[JsonObject] | None
    params: GenerationParams  # one object for many rows, without their seeds
    priority: int
    deadline_at: datetime | None
    requested_at: datetime | None = None  # submission of the job or its batch: the date for the chat template
    prompt_ids: list[int] | None = None  # instead of a text
    rendering: Rendering | None = None  # of the messages; None: defaults
    saved: SavedTokens | None = None  # tokens of an earlier attempt
    constrained: Constrained | None = None  # the constraint on the answer
    reuse: str | None = None  # which earlier answers may stand for its own (`jobs.request.reuse`)
    content_key: str | None = None
    seed: int = 0
    unreadable: str | None = None  # why this version cannot run it, for example as a newer one wrote it


def requested_at(created_at: datetime, batch_created_at: datetime | None) -> datetime:
    """Return the time of the request: one time for all rows of a batch, however long submitting them took."""
    return created_at if batch_created_at is None else min(created_at, batch_created_at)


CLAIMED = (
    JobRow.id,
    JobRow.attempt,
    JobRow.prompt,
    JobRow.messages,
    JobRow.prompt_ids,
    JobRow.rendering,
    cast(JobRow.params, Text),
    JobRow.seed,
    JobRow.priority,
    JobRow.deadline_at,
    JobRow.created_at,
    BATCH_CREATED_AT,
    JobRow.constrained,
    JobRow.reuse,
    JobRow.content_key,
)
"""The columns that `read_claim` takes, in its order."""


def read_claim(row: Any, saved: SavedTokens | None) -> Claim:
    """Parse a row of `CLAIMED`. An unreadable row is a claim, too: it fails alone, and the others of its
    shard run."""
    (
        job_id, attempt, prompt, messages, prompt_ids, stored_rendering, stored_params, seed, priority,
        deadline_at, created_at, batch_created_at, stored_constraint, reuse, content_key,
    ) = row  # fmt: skip
    params, seed, fault = _params_of(job_id, stored_params, seed)
    if messages is not None and type(messages) is not list:
        fault = "messages: not a list"
    if prompt_ids is not None and not is_token_ids(prompt_ids):
        fault = "prompt_ids: not a list of token ids"
    constrained = rendering = None
    if stored_constraint is not None:
        constrained = Constrained.read(stored_constraint)
        if constrained is None or constrained.kind not in KINDS_OF_ROWS:
            fault = f"constrained: not one of {', '.join(KINDS_OF_ROWS)}"
    if stored_rendering is not None:
        rendering = Rendering.read(stored_rendering)
        try:
            template_variables(None if rendering is None else rendering.variables)
            if rendering is not None and rendering.tools is not None:
                check_read(rendering.tools)
        except ValueError as error:
            fault = f"rendering: {error}"
    if fault is not None:
        fault += (
            "; this worker does not understand the job, and may be older than the client that wrote it: "
            "upgrade the worker, then retry the job"
        )
    return Claim(
        job_id=job_id,
        attempt=attempt,
        prompt=prompt,
        messages=messages,
        prompt_ids=prompt_ids,
        rendering=rendering,
        params=params,
        seed=seed,
        priority=priority,
        deadline_at=deadline_at,
        requested_at=requested_at(created_at, batch_created_at),
        saved=saved,
        constrained=constrained,
        reuse=reuse,
        content_key=content_key,
        unreadable=fault,
    )


def _params_of(job_id: str, stored: Any, seed: Any) -> tuple[GenerationParams, int, str | None]:
    """Return the parameters of a claimed row, its seed, and what is wrong with them."""
    # Most rows of a batch have the same text of parameters: it is parsed once.
    parse = _parsed if isinstance(stored, str) and len(stored) <= _REMEMBERED else _parsed.__wrapped__
    try:
        params = parse(stored)
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            GenerationParams.parse({"seed": seed})  # which says what is wrong with it
            raise InvalidParameterError(f"seed: must be a number from 0 to {MAX_SEED} (got {seed})")
        return params, seed, None
    except InvalidParameterError as error:
        return DEFAULTS, 0, f"params: {error}"
    except Exception as error:
        log.exception("the parameters of job %s could not be read", job_id)
        return DEFAULTS, 0, f"params: {type(error).__name__}: {error}"


@lru_cache(maxsize=128)
def _parsed(stored: str) -> GenerationParams:
    """Parse a row's column of parameters."""
    values = load_json(stored)
    if not isinstance(values, Mapping):
        raise InvalidParameterError("not an object of parameters")
    return GenerationParams.parse({**values, "seed": None})
