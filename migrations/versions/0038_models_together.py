"""Workers that share a GPU, each with one of several models: what names them all.

Revision: 0038, after 0037.
"""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("together", sa.String(32), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "together")
