"""How often servers died while they read the file of a batch, and why a batch does not go on just now.

Revision: 0020, after 0019.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("http_batches", sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("http_batches", sa.Column("note", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("http_batches", "note")
    op.drop_column("http_batches", "attempts")
