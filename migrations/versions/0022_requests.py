"""The request over HTTP that a job came with, where it had several prompts.

Revision: 0022, after 0021.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("request_id", sa.String(32), nullable=True))
    there = sa.text("request_id IS NOT NULL")
    op.create_index(
        "ix_jobs_request_id", "jobs", ["request_id", "id"], sqlite_where=there, postgresql_where=there
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_request_id", table_name="jobs")
    op.drop_column("jobs", "request_id")
