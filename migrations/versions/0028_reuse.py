"""What a job's answer depends on, so that an earlier one may stand for it, and where it came from.

Revision: 0028, after 0027.

Jobs that are there have no key: nobody asked that their answers be found again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_WHERE = sa.text("content_key IS NOT NULL AND reused_from IS NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("reuse", sa.String(8), nullable=True))
    op.add_column("jobs", sa.Column("content_key", sa.String(32), nullable=True))
    op.add_column("jobs", sa.Column("reused_from", sa.String(32), nullable=True))
    op.create_index(
        "ix_jobs_content_key", "jobs", ["content_key"], sqlite_where=_WHERE, postgresql_where=_WHERE
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_content_key", "jobs", sqlite_where=_WHERE, postgresql_where=_WHERE)
    for name in ("reused_from", "content_key", "reuse"):
        op.drop_column("jobs", name)
