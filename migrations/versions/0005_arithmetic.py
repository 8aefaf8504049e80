"""The name of the arithmetic that computed a job's text. Rows that are there have none.

Revision: 0005, after 0004.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("arithmetic", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "arithmetic")
