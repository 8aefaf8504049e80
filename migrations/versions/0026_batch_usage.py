"""How many tokens of a batch over HTTP were not computed, or were thoughts: for its `usage`.

Revision: 0026, after 0025.
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_COLUMNS = ("cached_tokens", "reasoning_tokens")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("http_batches", sa.Column(name, sa.BigInteger, nullable=True))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("http_batches", name)
