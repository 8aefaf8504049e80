"""An index that counts what each owner has queued.

Revision: 0009, after 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_QUEUED = sa.text("state = 'queued' AND owner IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_jobs_queued_of_owner",
        "jobs",
        ["owner"],
        sqlite_where=_QUEUED,
        postgresql_where=_QUEUED,
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_queued_of_owner", table_name="jobs")
