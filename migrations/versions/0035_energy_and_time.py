"""What a row cost: its shares of the time and the energy of the steps that computed it.

Revision: 0035, after 0034.
"""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("gpu_seconds", sa.Double, nullable=True))
    op.add_column("jobs", sa.Column("energy_joules", sa.Double, nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "energy_joules")
    op.drop_column("jobs", "gpu_seconds")
