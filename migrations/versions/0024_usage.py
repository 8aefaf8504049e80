"""How many of a job's tokens were not computed, or were thoughts: for `usage` in OpenAI's shapes.

Revision: 0024, after 0023.
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_COLUMNS = ("cached_tokens", "reasoning_tokens")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("jobs", sa.Column(name, sa.Integer, nullable=True))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("jobs", name)
