"""Batches of files: where a job stands in its file, what a batch was submitted with, and wider indexes.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BATCH_COLUMNS = [
    ("format", sa.String(length=16)),
    ("source", sa.Text()),
    ("fingerprint", sa.String(length=64)),
    ("settings", sa.JSON(none_as_null=True)),
    ("row_count", sa.Integer()),
    ("scheduled_at", sa.DateTime(timezone=True)),
    ("deadline_at", sa.DateTime(timezone=True)),
    ("cancel_requested_at", sa.DateTime(timezone=True)),
]
PROGRESS = ["batch", "state", "stop_reason", "prompt_tokens", "completion_tokens"]
UNSENT, WAITING = ["priority", "scheduled_at", "id"], ["model", "priority", "sent_at", "id"]
# (name, columns, unique, condition)
NEW_INDEXES = [
    ("uq_jobs_batch_row", ["batch", "row"], True, '"row" IS NOT NULL'),
    ("ix_jobs_progress", PROGRESS, False, "batch IS NOT NULL"),
    ("ix_jobs_finished", ["batch", "finished_at", "id"], False, "finished_at IS NOT NULL"),
    ("ix_jobs_unsent", UNSENT, False, "state = 'queued' AND sent_at IS NULL"),
    ("ix_jobs_waiting", WAITING, False, "state = 'queued' AND sent_at IS NOT NULL"),
]
OLD_WAITING = ("ix_jobs_waiting", ["sent_at"], False, "state = 'queued'")


def upgrade() -> None:
    for name, kind in BATCH_COLUMNS:
        op.add_column("batches", sa.Column(name, kind, nullable=True))
    op.add_column("jobs", sa.Column("row", sa.Integer(), nullable=True))
    op.drop_index("ix_jobs_waiting", "jobs")
    for index in NEW_INDEXES:
        _create(*index)


def downgrade() -> None:
    for name, *_ in NEW_INDEXES:
        op.drop_index(name, "jobs")
    _create(*OLD_WAITING)
    op.drop_column("jobs", "row")
    for name, _ in BATCH_COLUMNS:
        op.drop_column("batches", name)


def _create(name: str, columns: list[str], unique: bool, condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, "jobs", columns, unique=unique, sqlite_where=where, postgresql_where=where)
