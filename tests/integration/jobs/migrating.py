"""Revisions that `nightmill migrate` passes over, and rows as they were then."""

from alembic import command
from alembic.config import Config
from sqlalchemy import text

from nightmill.jobs.sql.database import Database, migrations_dir


def alembic_config() -> Config:
    """Our migrations; a connection has to be added."""
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()))
    return config


def old_rows(database: Database, revision: str, *rows: dict[str, object]) -> Config:
    """Tables of that revision with rows in `jobs`, of which only what matters is said; for Alembic."""
    config = alembic_config()
    usual = {
        "id": "old", "state": "queued", "params": "{}", "seed": 1, "attempt": 0, "failures": 0,
        "max_attempts": 3, "priority": 5, "created_at": "2026-01-01",
    }  # fmt: skip
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        for row in rows:
            values = usual | row
            names = ", ".join(values), ", ".join(f":{name}" for name in values)
            connection.execute(text(f"INSERT INTO jobs ({names[0]}) VALUES ({names[1]})"), values)
    return config
