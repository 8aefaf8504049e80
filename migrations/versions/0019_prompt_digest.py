"""What a prompt's tokens were, so that verifying tells another prompt from another arithmetic.

Revision: 0019, after 0018.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("prompt_digest", sa.String(16), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "prompt_digest")
