"""How many attempts of a row ended with their worker, so that nobody knows what they cost.

Revision: 0037, after 0035.
"""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("uncounted_attempts", sa.Integer, nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "uncounted_attempts")
