"""The declared schema: four tables, typed. `migrations/` must lead to exactly this (a test compares)."""

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from jobs.contract import JsonObject

SCHEMA_REVISION = "0002"
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
    """A named set of jobs."""

    __tablename__ = "batches"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    model: Mapped[str | None] = mapped_column(String(200))
    meta: Mapped[JsonObject] = mapped_column("metadata", JSON)
    created_at: Mapped[datetime]


class WorkerRow(Base):
    """A worker process and its last sign of life."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    gpu: Mapped[str | None] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(200), index=True)
    state: Mapped[str] = mapped_column(String(16))
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index over the few rows that a hot query looks at; finished jobs do not burden it."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


class JobRow(Base):
    """One prompt: what was asked, where it stands, who runs it, what came out."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    batch: Mapped[str | None] = mapped_column(ForeignKey("batches.name"))
    custom_id: Mapped[str | None] = mapped_column(String(512))
    model: Mapped[str | None] = mapped_column(String(200))
    prompt: Mapped[str | None] = mapped_column(Text)
    messages: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    params: Mapped[JsonObject]
    seed: Mapped[int] = mapped_column(BigInteger)

    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int]
    failures: Mapped[int]
    max_attempts: Mapped[int]
    priority: Mapped[int]
    worker: Mapped[str | None] = mapped_column(String(32))
    sent_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]

    stop_reason: Mapped[str | None] = mapped_column(String(16))
    text: Mapped[str | None] = mapped_column(Text)
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(Text)
    errors: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))

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
        _partial("ix_jobs_running", "worker", where="state = 'running'"),
        _partial("ix_jobs_waiting", "sent_at", where="state = 'queued'"),
        _partial("ix_jobs_expiring", "deadline_at", where="state = 'queued' AND deadline_at IS NOT NULL"),
        _partial(
            "uq_jobs_idempotency_key", "idempotency_key", where="idempotency_key IS NOT NULL", unique=True
        ),
    )


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
