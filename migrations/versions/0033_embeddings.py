"""Embeddings of jobs that ask for them. Older rows did not.

Revision: 0033, after 0032.
"""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "embeddings",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_embeddings_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_embeddings"),
    )


def downgrade() -> None:
    op.drop_table("embeddings")
