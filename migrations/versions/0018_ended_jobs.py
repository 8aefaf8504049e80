"""An index by which pages see what ended in a span of time, and how fast.

Revision: 0018, after 0017.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_CONDITION = sa.text("finished_at IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_jobs_ended",
        "jobs",
        ["finished_at", "state", "completion_tokens"],
        sqlite_where=_CONDITION,
        postgresql_where=_CONDITION,
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_ended", "jobs")
