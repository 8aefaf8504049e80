"""The declared tables of what comes and goes over HTTP: files, batches, webhooks, and secrets of servers."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, LargeBinary, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.sql.tables import Base, partial_index
from nightmill.jobs.sql.types import StorableString


class FileRow(Base):
    """A file uploaded or written over HTTP. Its content is stored under its id in a folder of the servers."""

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
    """A batch submitted over HTTP: its input file, the servers' progress, its end.

    Its rows are jobs of a batch whose name is derived from `id`.
    """

    __tablename__ = "http_batches"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    name: Mapped[str | None] = mapped_column(String(200))  # the owner's word for it
    input_file: Mapped[str] = mapped_column(String(32))
    endpoint: Mapped[str | None] = mapped_column(String(64))  # required endpoint of all rows
    completion_window: Mapped[str | None] = mapped_column(String(32))  # as given
    meta: Mapped[JsonObject] = mapped_column("metadata", JSON)
    settings: Mapped[JsonObject]  # defaults of the rows
    status: Mapped[str] = mapped_column(String(16))
    errors: Mapped[list[Any]]  # the first rows that cannot be run, or why the file cannot be read
    invalid: Mapped[int | None]  # rows that cannot be run
    total: Mapped[int | None]  # this and the next six are written at the end
    completed: Mapped[int | None]
    failed: Mapped[int | None]
    prompt_tokens: Mapped[int | None] = mapped_column(BigInteger)
    completion_tokens: Mapped[int | None] = mapped_column(BigInteger)
    cached_tokens: Mapped[int | None] = mapped_column(BigInteger)
    reasoning_tokens: Mapped[int | None] = mapped_column(BigInteger)
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
        partial_index("ix_http_batches_open", "id", where=_OPEN),
        partial_index(
            "uq_http_batches_idempotency_key",
            "idempotency_key",
            where="idempotency_key IS NOT NULL",
            unique=True,
        ),
    )


class WebhookRow(Base):
    """A URL to be called once a batch has ended."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    batch: Mapped[str] = mapped_column(String(200))  # may not exist yet
    url: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    attempts: Mapped[int]
    next_at: Mapped[datetime | None]  # before which it is left alone; None: delivered or given up
    delivered_at: Mapped[datetime | None]
    error: Mapped[str | None] = mapped_column(StorableString(200))  # error of the last attempt

    __table_args__ = (
        UniqueConstraint("batch", "url", name="uq_webhooks_batch_url"),
        partial_index("ix_webhooks_next", "next_at", where="next_at IS NOT NULL"),
    )


class ServerSecretRow(Base):
    """A random secret shared by all servers."""

    __tablename__ = "server_secrets"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]


OPEN = text(_OPEN)
"""Condition for unfinished HTTP batches, as a literal, so that its partial index is used."""
VALIDATING = HttpBatchRow.status == "validating"
"""Condition for HTTP batches whose file is being read."""
