"""Batches that are handed in over HTTP. Older rows stay as they are.

Revision: 0013, after 0012.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_WITH_KEY = sa.text("idempotency_key IS NOT NULL")
_OPEN = sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')")


def upgrade() -> None:
    op.create_table(
        "http_batches",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(64), nullable=True),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("name", sa.String(200), nullable=True),
        sa.Column("input_file", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=True),
        sa.Column("completion_window", sa.String(32), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.Column("invalid", sa.Integer(), nullable=True),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("completed", sa.Integer(), nullable=True),
        sa.Column("failed", sa.Integer(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=True),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_file", sa.String(32), nullable=True),
        sa.Column("error_file", sa.String(32), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("in_progress_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finalizing_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelling_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("keeper", sa.String(32), nullable=True),
        sa.Column("kept_until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_http_batches"),
    )
    op.create_index("ix_http_batches_owner", "http_batches", ["owner", "id"])
    op.create_index(
        "ix_http_batches_open", "http_batches", ["id"], sqlite_where=_OPEN, postgresql_where=_OPEN
    )
    op.create_index(
        "uq_http_batches_idempotency_key",
        "http_batches",
        ["idempotency_key"],
        unique=True,
        sqlite_where=_WITH_KEY,
        postgresql_where=_WITH_KEY,
    )


def downgrade() -> None:
    op.drop_table("http_batches")
