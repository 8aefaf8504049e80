"""Conversion of rows of `jobs` to public snapshots, `Job`, with answers and log-probabilities."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, Select, select

from nightmill.jobs.base.contract import (
    FINAL_STATES,
    HELD_UNTIL,
    Constrained,
    JobState,
    Markup,
    Rendering,
    StopReason,
)
from nightmill.jobs.reply import token_ids
from nightmill.jobs.reply.job import Answer, Job
from nightmill.jobs.reply.token_ids import TokenIds
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.stored_parameters import from_stored
from nightmill.jobs.sql import answers, embeddings, logprobs
from nightmill.jobs.sql.tables import JobRow

T = TypeVar("T")
_AT_ONCE = 500  # ids in one statement


def read_jobs(connection: Connection, query: Select[Any]) -> list[Job]:
    """Return the jobs selected by a query for whole rows, with their answers."""
    rows = connection.execute(query).mappings().all()
    several = {row["id"]: row["text"] for row in rows if _ended_with(row, "n", "score")}
    asking = ("logprobs", "score", "prompt_logprobs", "return_token_ids")
    telling = [row["id"] for row in rows if _ended_with(row, *asking)]
    known = answers.read(connection, several) if several else {}
    packed_logprobs = logprobs.read(connection, telling) if telling else {}
    embedding = [row["id"] for row in rows if _ended_with(row, "embed", "rerank")]
    packed_embeddings = embeddings.read(connection, embedding) if embedding else {}
    gone = _gone(connection, {row["reused_from"] for row in rows} - {None})
    return [
        replace(job, reused_from_gone=job.reused_from in gone) if gone else job
        for job in (
            job_from_row(
                row,
                known.get(row["id"], ()),
                packed_logprobs.get(row["id"], {}),
                packed_embeddings.get(row["id"]),
            )
            for row in rows
        )
    ]


def _gone(connection: Connection, job_ids: set[str]) -> set[str]:
    """Return those of these jobs that have been deleted."""
    ids, there = sorted(job_ids), set[str]()
    for start in range(0, len(ids), _AT_ONCE):
        query = select(JobRow.id).where(JobRow.id.in_(ids[start : start + _AT_ONCE]))
        there.update(connection.execute(query).scalars())
    return job_ids - there


def _ended_with(row: RowMapping, *parameters: str) -> bool:
    """Return True if the job has ended and has one of these parameters."""
    params = row["params"] if isinstance(row["params"], dict) else {}
    return row["state"] in FINAL_STATES and any(name in params for name in parameters)


def job_from_row(
    row: RowMapping,
    several: tuple[Answer, ...] = (),
    packed_logprobs: Mapping[int, bytes] | None = None,
    packed_embedding: bytes | None = None,
) -> Job:
    """Convert a row of `jobs` to a public snapshot. Values that this version does not understand are shown
    unchanged.

    Never raises: a row written by a newer version must not hide the others of a list.
    """
    values = {name: row[name] for name in _SHOWN_AS_THEY_ARE}
    params = from_stored((_of_kind(row["params"], dict) or {}) | {"seed": row["seed"]})
    packed = packed_logprobs or {}
    ids = token_ids.read(packed.get(logprobs.TOKEN_IDS, b""))
    return Job(
        **values,
        several=_with_details(several, params, packed, ids),
        packed_logprobs=None if several else packed.get(0),
        packed_prompt_logprobs=packed.get(logprobs.OF_PROMPT),
        packed_embedding=packed_embedding,
        token_ids=ids,
        state=JobState.read(row["state"]),
        stop_reason=StopReason.read(row["stop_reason"]) if row["stop_reason"] else None,
        prompt_ids=_of_kind(row["prompt_ids"], list),
        messages=_of_kind(row["messages"], list),
        params=params,
        rendering=Rendering.read(row["rendering"]),
        constrained=Constrained.read(row["constrained"]),
        prompt_digest=row["prompt_digest"],
        markup=Markup.read(row["markup"]),
        request=_of_kind(row["request"], dict),
        errors=[entry for entry in _of_kind(row["errors"], list) or [] if isinstance(entry, dict)],
        held=row["held"] is not None and row["state"] == JobState.QUEUED,
        scheduled_at=None if row["scheduled_at"] == HELD_UNTIL else row["scheduled_at"],
        history=[entry for entry in _of_kind(row["history"], list) or [] if isinstance(entry, dict)],
        metadata=_of_kind(row["metadata"], dict) or {},
    )


def _with_details(
    several: tuple[Answer, ...], params: GenerationParams, packed: Mapping[int, bytes], ids: TokenIds | None
) -> tuple[Answer, ...]:
    """Return answers with the details of their tokens; those of a scoring job also with their texts."""
    texts = params.score if isinstance(params.score, tuple) and len(params.score) == len(several) else ()
    of_answers = dict(enumerate(ids.answers)) if ids is not None else {}
    answers = (
        replace(answer, packed_logprobs=packed.get(number), token_ids=of_answers.get(number))
        for number, answer in enumerate(several)
    )
    if not texts:
        return tuple(answers)
    return tuple(replace(answer, text=text) for answer, text in zip(answers, texts, strict=True))


_SHOWN_AS_THEY_ARE = {field.name for field in fields(Job)} - {
    *(
        "several",
        "packed_logprobs",
        "packed_prompt_logprobs",
        "packed_embedding",
        "token_ids",
        "state",
        "stop_reason",
        "prompt_ids",
        "messages",
        "params",
        "rendering",
        "constrained",
        "prompt_digest",
        "markup",
        "request",
        "errors",
        "history",
        "held",
        "scheduled_at",
        "reused_from_gone",
        "metadata",
    )
}


def _of_kind(value: Any, kind: type[T]) -> T | None:
    """Return the value of a JSON column if it has this type."""
    return value if isinstance(value, kind) else None
