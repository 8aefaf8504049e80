"""Whose job it is: the name of the key it was handed in with over HTTP. Rows that are there have none.

Revision: 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_OWNED = sa.text("owner IS NOT NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("owner", sa.String(length=64), nullable=True))
    op.create_index("ix_jobs_owner", "jobs", ["owner", "id"], sqlite_where=_OWNED, postgresql_where=_OWNED)


def downgrade() -> None:
    op.drop_index("ix_jobs_owner", table_name="jobs")
    op.drop_column("jobs", "owner")
