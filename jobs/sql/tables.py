"""The declared schema, typed. `migrations/` must lead to exactly this (a test compares)."""

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    literal,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from nightmill.jobs.contract import MAX_ERROR_LENGTH, JobState, JsonObject, storable

SCHEMA_REVISION = "0021"
"""The migration that these declarations match."""


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time, in UTC whatever the database: SQLite keeps no zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a time zone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class StorableText(TypeDecorator[str]):
    """Text that no user has had the chance to correct, a worker's: whatever is in it, it can be stored."""

    impl = Text
    cache_ok = True

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value, self.limit)


class StorableString(TypeDecorator[str]):
    """As StorableText, at most `length` characters."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value, self.length)


class Base(DeclarativeBase):
    """Naming rules give every constraint the same name on every database, for migrations to name."""

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
    """A named set of jobs. A submitted file or iterable has a `format`; others may grow for ever."""

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


class WorkerRow(Base):
    """A worker process and its last sign of life."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    host: Mapped[str] = mapped_column(StorableString(255))
    pid: Mapped[int]
    gpu: Mapped[str | None] = mapped_column(StorableString(255))
    model: Mapped[str] = mapped_column(String(200), index=True)
    state: Mapped[str] = mapped_column(String(16))
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    detail: Mapped[str | None] = mapped_column(StorableString(200))  # what it is doing, as while it loads
    stats: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # as of the heartbeat


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index over the few rows that a hot query looks at; finished jobs do not burden it."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


class JobRow(Base):
    """One prompt: what was asked, where it stands, who runs it, what came out."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    batch: Mapped[str | None] = mapped_column(ForeignKey("batches.name"))
    row: Mapped[int | None]  # place in the batch's file, from 1
    custom_id: Mapped[str | None] = mapped_column(String(512))
    model: Mapped[str | None] = mapped_column(String(200))
    prompt: Mapped[str | None] = mapped_column(Text)
    prompt_ids: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # in place of a text
    messages: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    rendering: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # of the messages
    params: Mapped[JsonObject]
    constrained: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # what its answer must be
    seed: Mapped[int] = mapped_column(BigInteger)

    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int]
    failures: Mapped[int]
    max_attempts: Mapped[int]
    priority: Mapped[int]
    worker: Mapped[str | None] = mapped_column(String(32))
    suspects: Mapped[str | None] = mapped_column(String(32))  # the group it was in flight with at a death
    sent_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]

    stop_reason: Mapped[str | None] = mapped_column(String(16))
    text: Mapped[str | None] = mapped_column(StorableText())
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    arithmetic: Mapped[str | None] = mapped_column(StorableText())  # that computed the text
    prompt_digest: Mapped[str | None] = mapped_column(String(16))  # of its token ids
    markup: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # what the text holds beside
    error: Mapped[str | None] = mapped_column(StorableText(MAX_ERROR_LENGTH))
    errors: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))

    owner: Mapped[str | None] = mapped_column(String(64))  # the name of the key it came with over HTTP
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    meta: Mapped[JsonObject | None] = mapped_column("metadata", JSON(none_as_null=True))

    created_at: Mapped[datetime]
    scheduled_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        _partial("ix_jobs_batch", "batch", "id", where="batch IS NOT NULL"),
        # Submitting a file again can never enter a row twice; and the order of results.
        _partial("uq_jobs_batch_row", "batch", "row", where='"row" IS NOT NULL', unique=True),
        # Everything that a status counts, so that it reads this index and no rows.
        _partial(
            "ix_jobs_progress",
            *("batch", "state", "stop_reason", "prompt_tokens", "completion_tokens"),
            where="batch IS NOT NULL",
        ),
        _partial("ix_jobs_finished", "batch", "finished_at", "id", where="finished_at IS NOT NULL"),
        # What ended in a span of time, and its tokens: read without the rows.
        _partial(
            "ix_jobs_ended",
            *("finished_at", "state", "completion_tokens"),
            where="finished_at IS NOT NULL",
        ),
        _partial("ix_jobs_running", "worker", where="state = 'running'"),
        # What the sweep takes for sending, in its order: jobs never announced, and announced long ago.
        _partial(
            "ix_jobs_unsent",
            *("priority", "scheduled_at", "id"),
            where="state = 'queued' AND sent_at IS NULL",
        ),
        _partial(
            "ix_jobs_waiting",
            *("model", "priority", "sent_at", "id"),
            where="state = 'queued' AND sent_at IS NOT NULL",
        ),
        _partial("ix_jobs_suspects", "suspects", "id", where="state = 'queued' AND suspects IS NOT NULL"),
        _partial("ix_jobs_expiring", "deadline_at", where="state = 'queued' AND deadline_at IS NOT NULL"),
        _partial("ix_jobs_owner", "owner", "id", where="owner IS NOT NULL"),
        _partial("ix_jobs_queued_of_owner", "owner", where="state = 'queued' AND owner IS NOT NULL"),
        _partial(
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
"""Of a job's batch; None if it has none."""


class PartialRow(Base):
    """The tokens that an unfinished job had when they were last saved; gone once the job has ended."""

    __tablename__ = "partials"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    attempt: Mapped[int]
    fingerprint: Mapped[str] = mapped_column(String(64))
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    saved_at: Mapped[datetime]


class AnswerRow(Base):
    """One of several answers of a job that has ended. The first's text is in `jobs`, and not here again."""

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
    """The log-probabilities of an answer that asked for them, as `jobs.logprobs` packs them."""

    __tablename__ = "logprobs"

    job_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)  # of the answer, from 0
    data: Mapped[bytes] = mapped_column(LargeBinary)


class FileRow(Base):
    """A file of somebody who comes over HTTP. Its content lies in a folder of the servers, under its id."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    purpose: Mapped[str] = mapped_column(String(16))
    filename: Mapped[str] = mapped_column(StorableString(255))  # shown, and never a path
    size: Mapped[int] = mapped_column(BigInteger)  # bytes
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_files_owner", "owner", "id"),)


_OPEN = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"


class HttpBatchRow(Base):
    """A batch that came over HTTP: the file that it is made of, how far servers have come with it, its end.

    Its rows are jobs of a batch whose name is made of `id`, once servers have begun to enter them.
    """

    __tablename__ = "http_batches"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    name: Mapped[str | None] = mapped_column(String(200))  # the owner's word for it
    input_file: Mapped[str] = mapped_column(String(32))
    endpoint: Mapped[str | None] = mapped_column(String(64))  # that all rows must be for
    completion_window: Mapped[str | None] = mapped_column(String(32))  # as it was said
    meta: Mapped[JsonObject] = mapped_column("metadata", JSON)
    settings: Mapped[JsonObject]  # defaults of the rows
    status: Mapped[str] = mapped_column(String(16))
    errors: Mapped[list[Any]]  # the first rows that cannot be run, or why the file cannot be read
    invalid: Mapped[int | None]  # rows that cannot be run
    total: Mapped[int | None]  # this and the next four are written at the end
    completed: Mapped[int | None]
    failed: Mapped[int | None]
    prompt_tokens: Mapped[int | None] = mapped_column(BigInteger)
    completion_tokens: Mapped[int | None] = mapped_column(BigInteger)
    output_file: Mapped[str | None] = mapped_column(String(32))
    error_file: Mapped[str | None] = mapped_column(String(32))

    created_at: Mapped[datetime]
    scheduled_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    keeper: Mapped[str | None] = mapped_column(String(32))  # the server that works on it,
    kept_until: Mapped[datetime | None]  # and until when others leave it alone
    attempts: Mapped[int] = mapped_column(
        server_default="0"
    )  # to read its file that a server did not survive
    note: Mapped[str | None] = mapped_column(Text)  # why it does not go on just now

    __table_args__ = (
        Index("ix_http_batches_owner", "owner", "id"),
        _partial("ix_http_batches_open", "id", where=_OPEN),
        _partial(
            "uq_http_batches_idempotency_key",
            "idempotency_key",
            where="idempotency_key IS NOT NULL",
            unique=True,
        ),
    )


class WebhookRow(Base):
    """A URL that is to be called once a batch has ended."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    batch: Mapped[str] = mapped_column(String(200))  # which need not be there yet
    url: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    attempts: Mapped[int]
    next_at: Mapped[datetime | None]  # before which it is left alone; None: delivered or given up
    delivered_at: Mapped[datetime | None]
    error: Mapped[str | None] = mapped_column(StorableString(200))  # of the last attempt

    __table_args__ = (
        UniqueConstraint("batch", "url", name="uq_webhooks_batch_url"),
        _partial("ix_webhooks_next", "next_at", where="next_at IS NOT NULL"),
    )


class ServerSecretRow(Base):
    """A random secret that all servers share."""

    __tablename__ = "server_secrets"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]


def in_state(state: JobState) -> ColumnElement[bool]:
    """`state = '...'`, written out: a condition with a bound parameter finds no partial index."""
    return JobRow.state == literal(str(state), literal_execute=True)


QUEUED = in_state(JobState.QUEUED)
RUNNING = in_state(JobState.RUNNING)
OPEN = text(_OPEN)
"""Of batches that came over HTTP: not ended; written out, too."""
VALIDATING = HttpBatchRow.status == "validating"
"""Of these: its file is read."""
