"""What a prompt's tokens were, so that verifying tells another prompt from another arithmetic.

Revision: 0021, after 0020.
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("prompt_digest", sa.String(16), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "prompt_digest")
