"""Workers that load several models in turn: what they may load, and each load.

Revision: 0034, after 0033.
"""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("models", sa.JSON, nullable=True))
    op.add_column(
        "workers", sa.Column("swap_for_interactive", sa.Boolean, nullable=False, server_default=sa.false())
    )
    time = sa.DateTime(timezone=True)
    op.create_table(
        "loads",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("worker", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
        sa.Column("began_at", time, nullable=False),
        sa.Column("ready_at", time, nullable=True),
        sa.Column("ended_at", time, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("failure", sa.String(16), nullable=True),
        sa.Column("settled", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.PrimaryKeyConstraint("id", name="pk_loads"),
    )
    op.create_index("ix_loads_worker", "loads", ["worker"])
    op.create_index("ix_loads_model", "loads", ["model"])


def downgrade() -> None:
    op.drop_table("loads")
    op.drop_column("workers", "swap_for_interactive")
    op.drop_column("workers", "models")
