"""The number of answers that a job is to have, so that a claim knows how many slots it needs.

Revision: 0025, after 0024.

Jobs that are there get the number that their parameters name. A client of before writes none: then it is 1,
and a worker that claims the job learns the number from its parameters.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_GROUP = 1000


def upgrade() -> None:
    op.add_column("jobs", sa.Column("answers", sa.Integer(), nullable=False, server_default="1"))
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("params", sa.Text), sa.column("answers"))
    connection = op.get_bind()
    # As text: a row may hold what is not JSON, and a database would refuse the whole statement.
    said = sa.cast(jobs.c.params, sa.Text)
    several = sa.or_(said.contains('"n":'), said.contains('"score":'))
    after = ""
    while rows := connection.execute(
        sa.select(jobs.c.id, said).where(several, jobs.c.id > after).order_by(jobs.c.id).limit(_GROUP)
    ).all():
        values = [{"job": job_id, "count": count} for job_id, text in rows if (count := _answers(text)) > 1]
        if values:
            statement = sa.update(jobs).where(jobs.c.id == sa.bindparam("job"))
            connection.execute(statement.values(answers=sa.bindparam("count")), values)
        after = rows[-1][0]


def _answers(text: str) -> int:
    try:
        params = json.loads(text)
    except ValueError:
        return 1
    if not isinstance(params, dict):
        return 1
    count = params.get("n")
    if isinstance(params.get("score"), list):
        count = len(params["score"])
    return count if type(count) is int and 0 < count < 1000 else 1


def downgrade() -> None:
    op.drop_column("jobs", "answers")
