"""Jobs, batches and workers.

Revision: 0001, the first.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Partial indexes: over the few rows that a hot query looks at. (name, columns, unique, condition)
JOBS_INDEXES = [
    ("ix_jobs_batch", ["batch", "id"], False, "batch IS NOT NULL"),
    ("ix_jobs_running", ["worker"], False, "state = 'running'"),
    ("ix_jobs_waiting", ["sent_at"], False, "state = 'queued'"),
    ("ix_jobs_expiring", ["deadline_at"], False, "state = 'queued' AND deadline_at IS NOT NULL"),
    ("uq_jobs_idempotency_key", ["idempotency_key"], True, "idempotency_key IS NOT NULL"),
]


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_batches"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(length=255), nullable=True),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_index("ix_workers_model", "workers", ["model"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("batch", sa.String(length=200), nullable=True),
        sa.Column("custom_id", sa.String(length=512), nullable=True),
        sa.Column("model", sa.String(length=200), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=True),
        sa.Column("messages", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=32), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stop_reason", sa.String(length=16), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("errors", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["batch"], ["batches.name"], name="fk_jobs_batch"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    for name, columns, unique, condition in JOBS_INDEXES:
        where = sa.text(condition)
        op.create_index(name, "jobs", columns, unique=unique, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_table("jobs")
    op.drop_table("workers")
    op.drop_table("batches")
