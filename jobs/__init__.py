"""Nightmill's client: enqueue prompts, read texts and stop reasons.

    from nightmill import jobs
    job_id = jobs.enqueue("Write a haiku about rain", max_tokens=64, temperature=0.8, seed=7)
    jobs.wait(job_id, timeout=60)
    print(jobs.get(job_id).text)

The functions share one client, made from the environment at the first call. For other settings, make a
`Client`: it has the same methods.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy.orm import Session

    from nightmill.jobs.base.arithmetic import Arithmetic
    from nightmill.jobs.base.contract import (
        FINAL_STATES,
        Constrained,
        ConstraintKind,
        JobState,
        Prompt,
        StopReason,
        WorkerState,
    )
    from nightmill.jobs.base.ids import JobIds
    from nightmill.jobs.base.settings import Settings
    from nightmill.jobs.batches.batch import Batch
    from nightmill.jobs.batches.batches import BatchSource
    from nightmill.jobs.batches.limits import LimitsChanged, SubmitSettings
    from nightmill.jobs.batches.submission import OnRows
    from nightmill.jobs.batches.trying import Trial
    from nightmill.jobs.batches.verifying import Verdict, Verification, VerifiedRow
    from nightmill.jobs.batches.waiting import Order
    from nightmill.jobs.client.client import Client
    from nightmill.jobs.errors import (
        BatchConflictError,
        BatchFileError,
        BatchNotFoundError,
        BrokerError,
        DatabaseError,
        DeliveryDelayedWarning,
        EmbeddingError,
        IdempotencyConflictError,
        IgnoredColumnWarning,
        InvalidParameterError,
        InvalidPromptError,
        InvalidRequestError,
        InvalidTransitionError,
        JobNotFoundError,
        NightmillError,
        NotServedError,
        RerankError,
        ScoreError,
        SettingsError,
        StreamChangedError,
        UnknownModelError,
        WaitTimeoutError,
    )
    from nightmill.jobs.formats.frames import Prompts
    from nightmill.jobs.reply.batch_status import BatchState, BatchStatus
    from nightmill.jobs.reply.embeddings import Embedding
    from nightmill.jobs.reply.job import Answer, Job, Worker
    from nightmill.jobs.reply.logprobs import LikelyToken, Score, Scores, TokenLogprob
    from nightmill.jobs.reply.parsing import Reply, ToolCall
    from nightmill.jobs.request.fields import BatchSettings, JobSettings
    from nightmill.jobs.request.parameters import GenerationParams
    from nightmill.jobs.streams.pieces import Piece, TextPosition
    from nightmill.jobs.tables.options import TableSettings

__all__ = [
    # the main path
    "enqueue",
    "enqueue_many",
    "get",
    "wait",
    "results",
    "stream",
    "Piece",
    "score",
    "embed_many",
    "rerank",
    "Scores",
    "Score",
    "TokenLogprob",
    "LikelyToken",
    # batches: files and iterables, whole
    "submit_batch",
    "try_rows",
    "Trial",
    "get_batch",
    "list_batches",
    "Batch",
    "BatchState",
    "BatchStatus",
    "BatchSettings",
    "TableSettings",
    "SubmitSettings",
    "LimitsChanged",
    # the same texts again, to the bit
    "verify",
    "Verification",
    "VerifiedRow",
    "Verdict",
    "Arithmetic",
    # the rest of a job's life
    "cancel",
    "cancel_batch",
    "retry",
    "list_jobs",
    "stats",
    "workers",
    # types
    "Job",
    "Answer",
    "Reply",
    "ToolCall",
    "JobState",
    "Worker",
    "WorkerState",
    "StopReason",
    "FINAL_STATES",
    "GenerationParams",
    "Constrained",
    "ConstraintKind",
    "JobSettings",
    "JobIds",
    "Client",
    "Settings",
    "default_client",
    # errors and warnings
    "NightmillError",
    "SettingsError",
    "InvalidRequestError",
    "IgnoredColumnWarning",
    "InvalidParameterError",
    "InvalidPromptError",
    "UnknownModelError",
    "IdempotencyConflictError",
    "BatchFileError",
    "BatchConflictError",
    "BatchNotFoundError",
    "JobNotFoundError",
    "InvalidTransitionError",
    "WaitTimeoutError",
    "StreamChangedError",
    "NotServedError",
    "ScoreError",
    "EmbeddingError",
    "RerankError",
    "DatabaseError",
    "BrokerError",
    "DeliveryDelayedWarning",
]

# The modules of the names above. They are imported at first use: SQLAlchemy and Celery take most of a second,
# which a program pays only when it enqueues, and the engine's process never.
_HOMES = {
    "reply.batch_status": ("BatchState", "BatchStatus"),
    "base.arithmetic": ("Arithmetic",),
    "batches.batch": ("Batch",),
    "batches.limits": ("LimitsChanged", "SubmitSettings"),
    "batches.trying": ("Trial",),
    "batches.verifying": ("Verdict", "Verification", "VerifiedRow"),
    "client.client": ("Client",),
    "base.contract": (
        "FINAL_STATES",
        "Constrained",
        "ConstraintKind",
        "JobState",
        "StopReason",
        "WorkerState",
    ),
    "errors": tuple(name for name in __all__ if name.endswith(("Error", "Warning"))),
    "request.fields": ("BatchSettings", "JobSettings"),
    "base.ids": ("JobIds",),
    "reply.job": ("Answer", "Job", "Worker"),
    "reply.logprobs": ("LikelyToken", "Score", "Scores", "TokenLogprob"),
    "request.parameters": ("GenerationParams",),
    "streams.pieces": ("Piece",),
    "tables.options": ("TableSettings",),
    "reply.parsing": ("Reply", "ToolCall"),
    "base.settings": ("Settings",),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:  # submodules among them: `from jobs import store` goes on to import that
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@cache
def default_client() -> Client:
    """Return the client that the functions of this module share, made from the environment."""
    from nightmill.jobs.client.client import Client

    return Client()


def enqueue(
    prompt: Prompt,
    *,
    session: Session | None = None,
    interactive: bool = False,
    **settings: Unpack[JobSettings],
) -> str:
    """Queue one prompt (a text, token ids, or chat messages); returns its job id. See Client.enqueue."""
    return default_client().enqueue(prompt, session=session, interactive=interactive, **settings)


def enqueue_many(
    prompts: Prompts,
    *,
    session: Session | None = None,
    interactive: bool = False,
    **settings: Unpack[JobSettings],
) -> JobIds:
    """Queue every prompt of an iterable or a table, in constant memory. See Client.enqueue_many."""
    return default_client().enqueue_many(prompts, session=session, interactive=interactive, **settings)


def submit_batch(
    source: BatchSource | None = None,
    *,
    name: str | None = None,
    on_rows: OnRows | None = None,
    webhook: str | None = None,
    **settings: Unpack[SubmitSettings],
) -> Batch:
    """Queue every row of a file, table or iterable as one batch, bad ones too. See Client.submit_batch."""
    return default_client().submit_batch(source, name=name, on_rows=on_rows, webhook=webhook, **settings)


def try_rows(
    source: BatchSource,
    *,
    rows: int = 10,
    seed_of_sample: int | None = None,
    timeout: float | None = None,
    **settings: Unpack[TableSettings],
) -> Trial:
    """Run some rows of a source at random, before all of them. See Client.try_rows."""
    return default_client().try_rows(
        source, rows=rows, seed_of_sample=seed_of_sample, timeout=timeout, **settings
    )


def get_batch(name: str) -> Batch:
    """Return a batch; raises BatchNotFoundError."""
    return default_client().get_batch(name)


def list_batches(*, limit: int = 50) -> list[Batch]:
    """Return the newest batches, newest first."""
    return default_client().list_batches(limit=limit)


def verify(
    batch: str,
    *,
    sample: int = 20,
    seed_of_sample: int | None = None,
    priority: int = 0,
    timeout: float | None = None,
    keep: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> Verification:
    """Compute some rows of a batch again from their seeds, and compare the texts. See Client.verify."""
    return default_client().verify(
        batch,
        sample=sample,
        seed_of_sample=seed_of_sample,
        priority=priority,
        timeout=timeout,
        keep=keep,
        on_rows=on_rows,
    )


def get(job_id: str) -> Job:
    """Return a snapshot of one job; raises JobNotFoundError."""
    return default_client().get(job_id)


def wait(
    jobs: str | Iterable[str] | None = None, *, batch: str | None = None, timeout: float | None = None
) -> None:
    """Return when the jobs (an id, ids, or a batch) are all final; raises WaitTimeoutError."""
    default_client().wait(jobs, batch=batch, timeout=timeout)


def results(
    jobs: Iterable[str] | None = None,
    *,
    batch: str | None = None,
    order: Order = "enqueued",
    wait: bool = True,
    timeout: float | None = None,
) -> Iterator[Job]:
    """Yield finished jobs in the order of enqueueing or as they finish. See Client.results."""
    return default_client().results(jobs, batch=batch, order=order, wait=wait, timeout=timeout)


def stream(
    job_id: str, *, answer: int = 0, after: TextPosition | str | None = None, timeout: float | None = None
) -> Iterator[Piece]:
    """Yield the text of a job in pieces while it is generated. See Client.stream."""
    return default_client().stream(job_id, answer=answer, after=after, timeout=timeout)


def score(
    prompt: Prompt,
    texts: Sequence[str],
    *,
    timeout: float | None = None,
    **settings: Unpack[JobSettings],
) -> Scores:
    """Compute how likely each text is after a prompt. See Client.score."""
    return default_client().score(prompt, texts, timeout=timeout, **settings)


def embed_many(
    texts: Iterable[Prompt], *, timeout: float | None = None, **settings: Unpack[JobSettings]
) -> list[Embedding]:
    """Compute the embedding of each text, in their order. See Client.embed_many."""
    return default_client().embed_many(texts, timeout=timeout, **settings)


def rerank(
    query: str, documents: Iterable[str], *, timeout: float | None = None, **settings: Unpack[JobSettings]
) -> list[float]:
    """Compute how relevant each document is for a query, 0 to 1, in their order. See Client.rerank."""
    return default_client().rerank(query, documents, timeout=timeout, **settings)


def cancel(job_id: str) -> JobState:
    """Cancel a job: a queued one at once, a running one at its next step."""
    return default_client().cancel(job_id)


def cancel_batch(batch: str) -> tuple[int, int]:
    """Cancel all unfinished jobs of a batch: (cancelled at once, running and asked to stop)."""
    return default_client().cancel_batch(batch)


def retry(job_id: str, *, deadline: datetime | timedelta | None = None) -> Job:
    """Queue a failed or cancelled job again, under its id and seed."""
    return default_client().retry(job_id, deadline=deadline)


def list_jobs(
    *,
    state: JobState | str | None = None,
    batch: str | None = None,
    model: str | None = None,
    limit: int = 50,
) -> list[Job]:
    """Return the newest jobs that match, newest first."""
    return default_client().list_jobs(state=state, batch=batch, model=model, limit=limit)


def stats(batch: str | None = None) -> dict[str, Any]:
    """Count jobs by state and stop reason, and prompt and completion tokens."""
    return default_client().stats(batch)


def workers() -> list[Worker]:
    """Return all workers, past and present, newest first."""
    return default_client().workers()
