"""Rows of `jobs` as the public snapshots, `Job`, with their answers and log-probabilities."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, RowMapping, Select

from nightmill.jobs.contract import FINAL_STATES, Constrained, JobState, Markup, Rendering, StopReason
from nightmill.jobs.job import Answer, Job
from nightmill.jobs.parameters import GenerationParams
from nightmill.jobs.sql import answers, logprobs

T = TypeVar("T")


def read_jobs(connection: Connection, query: Select[Any]) -> list[Job]:
    """The jobs whose whole rows a query selects, with their answers."""
    rows = connection.execute(query).mappings().all()
    several = {row["id"]: row["text"] for row in rows if _ended_with(row, "n", "score")}
    telling = [row["id"] for row in rows if _ended_with(row, "logprobs", "score")]
    known = answers.read(connection, several) if several else {}
    told = logprobs.read(connection, telling) if telling else {}
    return [job_from_row(row, known.get(row["id"], ()), told.get(row["id"], {})) for row in rows]


def _ended_with(row: RowMapping, *parameters: str) -> bool:
    """Whether a job has ended that was given one of these parameters."""
    params = row["params"] if isinstance(row["params"], dict) else {}
    return row["state"] in FINAL_STATES and any(name in params for name in parameters)


def job_from_row(
    row: RowMapping, several: tuple[Answer, ...] = (), told: Mapping[int, bytes] | None = None
) -> Job:
    """A row of `jobs` as the public snapshot. What this version does not understand is shown as it is.

    Never raises: one row that a newer version has written must not hide the others of its list.
    """
    values = {name: row[name] for name in _SHOWN_AS_THEY_ARE}
    params = GenerationParams.read((_of_kind(row["params"], dict) or {}) | {"seed": row["seed"]})
    return Job(
        **values,
        several=_told(several, params, told or {}),
        told=None if several else (told or {}).get(0),
        state=JobState.read(row["state"]),
        stop_reason=StopReason.read(row["stop_reason"]) if row["stop_reason"] else None,
        prompt_ids=_of_kind(row["prompt_ids"], list),
        messages=_of_kind(row["messages"], list),
        params=params,
        rendering=Rendering.read(row["rendering"]),
        constrained=Constrained.read(row["constrained"]),
        prompt_digest=row["prompt_digest"],
        markup=Markup.read(row["markup"]),
        errors=[one for one in _of_kind(row["errors"], list) or [] if isinstance(one, dict)],
        metadata=_of_kind(row["metadata"], dict) or {},
    )


def _told(
    several: tuple[Answer, ...], params: GenerationParams, told: Mapping[int, bytes]
) -> tuple[Answer, ...]:
    """Answers with their log-probabilities; those of texts that are given are these texts."""
    texts = params.score if isinstance(params.score, tuple) and len(params.score) == len(several) else ()
    answers = (replace(answer, told=told.get(number)) for number, answer in enumerate(several))
    if not texts:
        return tuple(answers)
    return tuple(replace(answer, text=text) for answer, text in zip(answers, texts, strict=True))


_SHOWN_AS_THEY_ARE = {field.name for field in fields(Job)} - {
    *(
        "several",
        "told",
        "state",
        "stop_reason",
        "prompt_ids",
        "messages",
        "params",
        "rendering",
        "constrained",
        "prompt_digest",
        "markup",
        "errors",
        "metadata",
    )
}


def _of_kind(value: Any, kind: type[T]) -> T | None:
    """A JSON column's value, if it is what it should be."""
    return value if isinstance(value, kind) else None
