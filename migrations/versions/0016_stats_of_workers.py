"""What workers say of themselves with each heartbeat. Older rows say nothing.

Revision: 0016, after 0015.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("stats", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "stats")
