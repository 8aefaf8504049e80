"""Suspects of a death, batches that are being deleted, and what a worker is doing.

Revision: 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_QUEUED_SUSPECTS = sa.text("state = 'queued' AND suspects IS NOT NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("suspects", sa.String(length=32), nullable=True))
    op.add_column("batches", sa.Column("deleting_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("workers", sa.Column("detail", sa.String(length=200), nullable=True))
    op.create_index(
        "ix_jobs_suspects",
        "jobs",
        ["suspects", "id"],
        sqlite_where=_QUEUED_SUSPECTS,
        postgresql_where=_QUEUED_SUSPECTS,
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_suspects", table_name="jobs")
    op.drop_column("workers", "detail")
    op.drop_column("batches", "deleting_at")
    op.drop_column("jobs", "suspects")
