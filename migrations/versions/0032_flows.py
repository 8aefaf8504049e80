"""Indexes over the flows of queues, and the table of what workers spend their time on.

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


_KINDS = ("computing", "memory", "tokenizer", "messages", "loading")


def upgrade() -> None:
    op.create_table(
        "activity",
        sa.Column("worker", sa.String(32), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        *(sa.Column(f"{kind}_seconds", sa.Double, nullable=False, server_default="0") for kind in _KINDS),
        sa.PrimaryKeyConstraint("worker", "began_at", name="pk_activity"),
    )
    op.create_index("ix_activity_began_at", "activity", ["began_at"])
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
    op.drop_table("activity")
