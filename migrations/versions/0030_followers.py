"""Rows that follow rows: the job that one follows, and its prompt until that job's answer is put into it.

Revision: 0030, after 0029.

A held job is queued with a time to begin that never comes, so that workers of older versions leave it alone.
"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_INDICES = {
    "ix_jobs_held": (["batch", "id"], sa.text("state = 'queued' AND held IS NOT NULL")),
    "ix_jobs_prior": (["prior", "id"], sa.text("held IS NOT NULL")),
}


def upgrade() -> None:
    op.add_column("jobs", sa.Column("prior", sa.String(32), nullable=True))
    op.add_column("jobs", sa.Column("held", sa.JSON, nullable=True))
    for name, (columns, where) in _INDICES.items():
        op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    for name, (_, where) in _INDICES.items():
        op.drop_index(name, "jobs", sqlite_where=where, postgresql_where=where)
    for name in ("held", "prior"):
        op.drop_column("jobs", name)
