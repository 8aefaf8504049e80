"""Limits of batches: budgets and failures, what ended rows have used, and when a limit stopped a batch.

Revision: 0031, after 0029.
"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0029"
branch_labels = None
depends_on = None


def _added() -> list[sa.Column]:
    return [
        sa.Column("budget", sa.JSON),
        sa.Column("max_failures", sa.Double),
        sa.Column("spent_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("spent_gpu_seconds", sa.Double, nullable=False, server_default="0"),
        sa.Column("spent_joules", sa.Double, nullable=False, server_default="0"),
        sa.Column("counted_rows", sa.Integer, nullable=False, server_default="0"),
        sa.Column("counted_failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("stopped_at", sa.DateTime(timezone=True)),
        sa.Column("stopped_because", sa.Text),
    ]


def upgrade() -> None:
    for column in _added():
        op.add_column("batches", column)


def downgrade() -> None:
    for column in reversed(_added()):
        op.drop_column("batches", column.name)
