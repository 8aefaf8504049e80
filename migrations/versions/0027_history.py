"""What a job was before it was queued again with other parameters, so that its row tells both.

Revision: 0027, after 0026.
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("history", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "history")
