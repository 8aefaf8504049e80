"""Indexes over the flows of queues: batches, and the jobs of owners without a batch.

Revision: 0032, after 0031.
"""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_jobs_flows_of_batches": ("batch", "state = 'queued' AND batch IS NOT NULL"),
    "ix_jobs_flows_of_owners": ("owner", "state = 'queued' AND batch IS NULL"),
}


def upgrade() -> None:
    for name, (flow, where) in _INDEXES.items():
        op.create_index(
            name,
            "jobs",
            ["model", "priority", flow, "sent_at", "scheduled_at", "id"],
            sqlite_where=sa.text(where),
            postgresql_where=sa.text(where),
        )


def downgrade() -> None:
    for name in reversed(_INDEXES):
        op.drop_index(name, "jobs")
