"""Alembic's entry point. `nightmill migrate` hands in a connection; the `alembic` command line does not."""

from alembic import context

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.declared import METADATA


def run(connection: object) -> None:
    context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with Database(Settings.from_env()).engine.begin() as own:
        run(own)
