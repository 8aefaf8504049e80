"""A claimed row as a worker takes it, whatever a client of another version has written into it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from nightmill.jobs.checks import template_variables
from nightmill.jobs.contract import KINDS_OF_ROWS, Constrained, JsonObject, Rendering, is_token_ids
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.parameters import GenerationParams
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.tools import check_read

__all__ = ["Claim", "read_claim", "requested_at"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this worker may run, until someone else claims it."""

    job_id: str
    attempt: int
    prompt: str | None
    messages: list[JsonObject] | None
    params: GenerationParams  # with its seed
    priority: int
    deadline_at: datetime | None
    requested_at: datetime | None = None  # it was handed in, or its batch: the time for its chat template
    prompt_ids: list[int] | None = None  # in place of a text
    rendering: Rendering | None = None  # of the messages; None: as usual
    saved: SavedTokens | None = None  # what an earlier attempt had drawn
    constrained: Constrained | None = None  # what the answer must be
    unreadable: str | None = None  # why this version cannot run it, as when a newer one wrote the row


def requested_at(created_at: datetime, batch_created_at: datetime | None) -> datetime:
    """When a job was asked for: all rows of a batch at the same time, however long they took to enter."""
    return created_at if batch_created_at is None else min(created_at, batch_created_at)


def read_claim(row: Any, saved: SavedTokens | None) -> Claim:
    """A claimed row. One that cannot be read is a claim, too: it fails, and the others of its shard run."""
    params, fault = GenerationParams(), None
    try:
        if not isinstance(row.params, Mapping):
            raise InvalidParameterError("not an object of parameters")
        params = GenerationParams.parse({**row.params, "seed": row.seed})
    except InvalidParameterError as error:
        fault = f"params: {error}"
    except Exception as error:
        log.exception("the parameters of job %s could not be read", row.id)
        fault = f"params: {type(error).__name__}: {error}"
    if not isinstance(row.messages, list | None):
        fault = "messages: not a list"
    if row.prompt_ids is not None and not is_token_ids(row.prompt_ids):
        fault = "prompt_ids: not a list of token ids"
    constrained = Constrained.read(row.constrained)
    if row.constrained is not None and (constrained is None or constrained.kind not in KINDS_OF_ROWS):
        fault = f"constrained: not one of {', '.join(KINDS_OF_ROWS)}"
    rendering = Rendering.read(row.rendering)
    if row.rendering is not None:
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
        job_id=row.id,
        attempt=row.attempt,
        prompt=row.prompt,
        messages=row.messages,
        prompt_ids=row.prompt_ids,
        rendering=rendering,
        params=params,
        priority=row.priority,
        deadline_at=row.deadline_at,
        requested_at=requested_at(row.created_at, row.batch_created_at),
        saved=saved,
        constrained=constrained,
        unreadable=fault,
    )
