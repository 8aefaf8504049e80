"""Several answers of a job. Older rows have one, which is in `jobs`.

Revision: 0011, after 0010.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("stop_reason", sa.String(16), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_answers_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_answers"),
    )


def downgrade() -> None:
    op.drop_table("answers")
