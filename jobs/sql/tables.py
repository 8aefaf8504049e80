"""The declared tables of batches, jobs and workers; those of HTTP are in `http_tables`."""

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    and_,
    false,
    literal,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from nightmill.jobs.base.contract import MAX_ERROR_LENGTH, JobState, JsonObject
from nightmill.jobs.sql.types import StorableString, StorableText, UtcDateTime

SCHEMA_REVISION = "0038"
"""The migration that the declarations match (`declared`)."""


class Base(DeclarativeBase):
    """The declarative base, whose naming rules give every constraint the same name on every database, for
    migrations."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {datetime: UtcDateTime(), JsonObject: JSON(), list[Any]: JSON()}


class BatchRow(Base):
    """A named set of jobs. A submitted file or iterable has a `format`; other batches may always grow."""

    __tablename__ = "batches"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    model: Mapped[str | None] = mapped_column(String(200))
    meta: Mapped[JsonObject] = mapped_column("metadata", JSON)
    created_at: Mapped[datetime]

    format: Mapped[str | None] = mapped_column(String(16))
    source: Mapped[str | None] = mapped_column(Text)  # path of the file, as it was given
    fingerprint: Mapped[str | None] = mapped_column(String(64))  # SHA-256 of the file
    settings: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # defaults of the rows
    row_count: Mapped[int | None]  # None until the last row is entered
    scheduled_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    deleting_at: Mapped[datetime | None]  # set once its rows are being deleted: nothing is added any more

    # Limits of the whole batch, what its ended rows have used, and the end that a limit brought.
    budget: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # most, by measure
    max_failures: Mapped[float | None] = mapped_column(Double)  # share of rows
    spent_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    spent_gpu_seconds: Mapped[float] = mapped_column(Double, server_default="0")
    spent_joules: Mapped[float] = mapped_column(Double, server_default="0")
    counted_rows: Mapped[int] = mapped_column(server_default="0")  # rows whose failures are counted,
    counted_failures: Mapped[int] = mapped_column(server_default="0")  # and those that failed
    stopped_at: Mapped[datetime | None]
    stopped_because: Mapped[str | None] = mapped_column(StorableText(MAX_ERROR_LENGTH))


class WorkerRow(Base):
    """A worker process and its last heartbeat."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    host: Mapped[str] = mapped_column(StorableString(255))
    pid: Mapped[int]
    gpu: Mapped[str | None] = mapped_column(StorableString(255))
    model: Mapped[str] = mapped_column(String(200), index=True)
    state: Mapped[str] = mapped_column(String(16))
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    # Current activity, for example while it loads.
    detail: Mapped[str | None] = mapped_column(StorableString(200))
    stats: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # as of the heartbeat
    paused: Mapped[bool] = mapped_column(server_default=false())  # by hand: it is to sleep until resumed
    # Names of the models that it loads in turn; `model` is the one that is loaded, or was last.
    models: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    swap_for_interactive: Mapped[bool] = mapped_column(server_default=false())
    together: Mapped[str | None] = mapped_column(String(32))  # the same in workers that share a GPU


class LoadRow(Base):
    """A load of a model by a worker that serves several in turn: from its choice to its end."""

    __tablename__ = "loads"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    worker: Mapped[str] = mapped_column(String(32), index=True)
    model: Mapped[str] = mapped_column(String(200), index=True)
    reason: Mapped[str] = mapped_column(StorableString(200))  # why it was chosen
    began_at: Mapped[datetime]
    ready_at: Mapped[datetime | None]  # None: it has not become ready, or not yet
    ended_at: Mapped[datetime | None]
    error: Mapped[str | None] = mapped_column(StorableText(MAX_ERROR_LENGTH))  # why it did not become ready
    failure: Mapped[str | None] = mapped_column(String(16))  # what that is a fault of
    settled: Mapped[bool] = mapped_column(server_default=false())  # a failure that rows were charged with


class ActivityRow(Base):
    """Some minutes of a worker, in seconds by what it spent them on."""

    __tablename__ = "activity"

    worker: Mapped[str] = mapped_column(String(32), primary_key=True)
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime]
    model: Mapped[str] = mapped_column(String(200))
    computing_seconds: Mapped[float] = mapped_column(Double, server_default="0")
    memory_seconds: Mapped[float] = mapped_column(Double, server_default="0")  # with sequences without pages
    tokenizer_seconds: Mapped[float] = mapped_column(Double, server_default="0")  # with prompts on their way
    messages_seconds: Mapped[float] = mapped_column(Double, server_default="0")  # without jobs
    loading_seconds: Mapped[float] = mapped_column(Double, server_default="0")

    __table_args__ = (Index("ix_activity_began_at", "began_at"),)


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index over the few rows of a frequent query, which finished jobs do not enlarge."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


class JobRow(Base):
    """A prompt: its request, state, owner and result."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    batch: Mapped[str | None] = mapped_column(ForeignKey("batches.name"))
    row: Mapped[int | None]  # place in the batch's file, from 1
    custom_id: Mapped[str | None] = mapped_column(String(512))
    model: Mapped[str | None] = mapped_column(String(200))
    prompt: Mapped[str | None] = mapped_column(Text)
    prompt_ids: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # in place of a text
    messages: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    # Options for rendering the messages.
    rendering: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    params: Mapped[JsonObject]
    # Constraint on the answer.
    constrained: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    seed: Mapped[int] = mapped_column(BigInteger)
    answers: Mapped[int] = mapped_column(server_default="1")  # number of texts in the result
    # Parts that the response repeats.
    request: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))

    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int]
    failures: Mapped[int]
    max_attempts: Mapped[int]
    priority: Mapped[int]
    reuse: Mapped[str | None] = mapped_column(String(8))  # which earlier answers may stand for its own
    content_key: Mapped[str | None] = mapped_column(String(32))  # what its answer depends on
    worker: Mapped[str | None] = mapped_column(String(32))
    suspects: Mapped[str | None] = mapped_column(String(32))  # group of suspects since a worker's death
    sent_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]

    stop_reason: Mapped[str | None] = mapped_column(String(16))
    text: Mapped[str | None] = mapped_column(StorableText())
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]  # tokens of the prompt found in the cache
    reasoning_tokens: Mapped[int | None]  # reasoning tokens of all answers
    # Shares of the steps that computed it, in all its attempts; joules where the GPU tells.
    gpu_seconds: Mapped[float | None] = mapped_column(Double)
    energy_joules: Mapped[float | None] = mapped_column(Double)
    uncounted_attempts: Mapped[int | None]  # that ended with their worker: what they cost is not known
    arithmetic: Mapped[str | None] = mapped_column(StorableText())  # name of what computed the text
    prompt_digest: Mapped[str | None] = mapped_column(String(16))  # digest of the token ids
    reused_from: Mapped[str | None] = mapped_column(String(32))  # the job that the text was computed for
    # Markup of reasoning and calls.
    markup: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None] = mapped_column(StorableText(MAX_ERROR_LENGTH))
    errors: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    prior: Mapped[str | None] = mapped_column(String(32))  # the job that it follows
    # Its prompt, until the answer of that job is put into it (`jobs.request.following`).
    held: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    # What it was before it was queued again with other parameters.
    history: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))

    owner: Mapped[str | None] = mapped_column(String(64))  # the name of the key it came with over HTTP
    request_id: Mapped[str | None] = mapped_column(String(32))  # id of a request with several prompts
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    meta: Mapped[JsonObject | None] = mapped_column("metadata", JSON(none_as_null=True))

    created_at: Mapped[datetime]
    scheduled_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        partial_index("ix_jobs_batch", "batch", "id", where="batch IS NOT NULL"),
        # Prevents entering a row twice, and gives the order of results.
        partial_index("uq_jobs_batch_row", "batch", "row", where='"row" IS NOT NULL', unique=True),
        # Covers everything that a status counts, so that it reads no rows.
        partial_index(
            "ix_jobs_progress",
            *("batch", "state", "stop_reason", "prompt_tokens", "completion_tokens"),
            where="batch IS NOT NULL",
        ),
        partial_index("ix_jobs_finished", "batch", "finished_at", "id", where="finished_at IS NOT NULL"),
        # Jobs that ended in a period, and their tokens, without reading rows.
        partial_index(
            "ix_jobs_ended",
            *("finished_at", "state", "completion_tokens"),
            where="finished_at IS NOT NULL",
        ),
        partial_index("ix_jobs_running", "worker", where="state = 'running'"),
        # Jobs that the sweep announces, in its order: never announced, or announced long ago.
        partial_index(
            "ix_jobs_unsent",
            *("priority", "scheduled_at", "id"),
            where="state = 'queued' AND sent_at IS NULL",
        ),
        partial_index(
            "ix_jobs_waiting",
            *("model", "priority", "sent_at", "id"),
            where="state = 'queued' AND sent_at IS NOT NULL",
        ),
        # The flows of a queue, with those of their rows that have a message or are due for one.
        partial_index(
            "ix_jobs_flows_of_batches",
            *("model", "priority", "batch", "sent_at", "scheduled_at", "id"),
            where="state = 'queued' AND batch IS NOT NULL",
        ),
        partial_index(
            "ix_jobs_flows_of_owners",
            *("model", "priority", "owner", "sent_at", "scheduled_at", "id"),
            where="state = 'queued' AND batch IS NULL",
        ),
        partial_index(
            "ix_jobs_suspects", "suspects", "id", where="state = 'queued' AND suspects IS NOT NULL"
        ),
        partial_index(
            "ix_jobs_expiring", "deadline_at", where="state = 'queued' AND deadline_at IS NOT NULL"
        ),
        # Computed answers, by what they depend on.
        partial_index(
            "ix_jobs_content_key", "content_key", where="content_key IS NOT NULL AND reused_from IS NULL"
        ),
        # Jobs that wait for another, by batch and by that other; the latter also after they ended unfilled.
        partial_index("ix_jobs_held", "batch", "id", where="state = 'queued' AND held IS NOT NULL"),
        partial_index("ix_jobs_prior", "prior", "id", where="held IS NOT NULL"),
        partial_index("ix_jobs_owner", "owner", "id", where="owner IS NOT NULL"),
        partial_index("ix_jobs_request_id", "request_id", "id", where="request_id IS NOT NULL"),
        partial_index("ix_jobs_queued_of_owner", "owner", where="state = 'queued' AND owner IS NOT NULL"),
        partial_index(
            "uq_jobs_idempotency_key", "idempotency_key", where="idempotency_key IS NOT NULL", unique=True
        ),
    )


BATCH_CREATED_AT = (
    select(BatchRow.created_at)
    .where(BatchRow.name == JobRow.batch)
    .correlate(JobRow)
    .scalar_subquery()
    .label("batch_created_at")
)
"""Creation time of the batch of a job; None without a batch."""


class PartialRow(Base):
    """The saved tokens of an unfinished job, or of one whose answer was cut."""

    __tablename__ = "partials"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    attempt: Mapped[int]
    fingerprint: Mapped[str] = mapped_column(String(64))
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    saved_at: Mapped[datetime]


class AnswerRow(Base):
    """One of several answers of an ended job. The text of the first is only in `jobs`."""

    __tablename__ = "answers"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)  # from 0
    text: Mapped[str | None] = mapped_column(StorableText())
    stop_reason: Mapped[str] = mapped_column(String(16))
    completion_tokens: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)


class LogprobsRow(Base):
    """The log-probabilities of an answer, packed by `jobs.reply.logprobs`."""

    __tablename__ = "logprobs"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)  # number of the answer, from 0; below 0: the prompt
    data: Mapped[bytes] = mapped_column(LargeBinary)


class EmbeddingRow(Base):
    """The embedding of an ended job, float32 (`jobs.reply.embeddings`)."""

    __tablename__ = "embeddings"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    data: Mapped[bytes] = mapped_column(LargeBinary)


def in_state(state: JobState) -> ColumnElement[bool]:
    """Return `state = '...'` as a literal: a condition with a bound parameter would not use a partial
    index."""
    return JobRow.state == literal(str(state), literal_execute=True)


QUEUED = in_state(JobState.QUEUED)
RUNNING = in_state(JobState.RUNNING)
HELD = and_(QUEUED, JobRow.held.is_not(None))
"""Condition for jobs that wait for the one that they follow."""
