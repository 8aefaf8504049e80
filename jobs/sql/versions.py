"""Checks that a database is of this version of Nightmill and can hold it, and errors for one that is not."""

import re

from sqlalchemy import Connection, inspect, text

from nightmill.jobs.errors import SchemaError
from nightmill.jobs.sql.declared import METADATA
from nightmill.jobs.sql.tables import SCHEMA_REVISION

_TABLE = "alembic_version"
_OURS = re.compile(r"[0-9]{4}")
_ENCODING = "UTF8"
_FIRST_SHOWN = 3
_REMEDY = "Give Nightmill a database of its own"


def find_revision(connection: Connection, where: str) -> str | None:
    """Return the schema revision in a database; None if it has no Nightmill tables.

    Raises SchemaError if the database is another program's.
    """
    if not inspect(connection).has_table(_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {_TABLE}")).scalars().all()  # noqa: S608 - ours
    if not found:
        return None
    if len(found) > 1 or not _OURS.fullmatch(found[0]):
        raise SchemaError(
            f"the database at {where} is another program's: its table {_TABLE} says {', '.join(found)!r}. "
            f"{_REMEDY}"
        )
    return str(found[0])


def check_revision(found: str | None, where: str) -> None:
    """Raise SchemaError unless a database is of this version."""
    if found is None:
        raise SchemaError(f"the database at {where} has no Nightmill tables: run `nightmill migrate`")
    check_not_newer(found, where)
    if found != SCHEMA_REVISION:
        raise SchemaError(
            f"the database at {where} has schema {found}, this version of Nightmill needs {SCHEMA_REVISION}: "
            "run `nightmill migrate`, or install the version of Nightmill that the other programs use"
        )


def check_not_newer(found: str | None, where: str) -> None:
    """Raise SchemaError for a database of a newer version."""
    if found is not None and found > SCHEMA_REVISION:
        raise SchemaError(
            f"the database at {where} has schema {found}, of a newer version of Nightmill; this version "
            f"needs {SCHEMA_REVISION}: install the version that the other programs use"
        )


def check_encoding(connection: Connection, where: str) -> None:
    """Raise SchemaError for a PostgreSQL database that cannot hold every text."""
    if connection.dialect.name == "sqlite":
        return
    found = connection.execute(text("SHOW server_encoding")).scalar_one()
    if found != _ENCODING:
        raise SchemaError(
            f"the database at {where} has the encoding {found}, in which not every answer can be kept: "
            f"make one with CREATE DATABASE ... ENCODING '{_ENCODING}' TEMPLATE template0"
        )


def check_complete(connection: Connection, where: str) -> None:
    """Raise SchemaError unless a migrated database has every table and column that it should have."""
    looked_at = inspect(connection)
    there = set(looked_at.get_table_names())
    lacking: list[str] = []
    for table in METADATA.sorted_tables:
        if table.name not in there:
            lacking.append(table.name)
            continue
        columns = {column["name"] for column in looked_at.get_columns(table.name)}
        lacking += [f"{table.name}.{column.name}" for column in table.columns if column.name not in columns]
    if lacking:
        more = f" and {len(lacking) - _FIRST_SHOWN} more" if len(lacking) > _FIRST_SHOWN else ""
        raise SchemaError(
            f"the database at {where} says that it has schema {SCHEMA_REVISION}, and lacks "
            f"{', '.join(lacking[:_FIRST_SHOWN])}{more}: its tables were changed by hand, or are another "
            f"program's. Restore a backup, or begin with an empty database"
        )


def not_migrated(said: str, where: str) -> SchemaError:
    """Return the error for tables that are in a migration's way, or that it does not find."""
    return SchemaError(
        f"the database at {where} was not migrated, and is as it was: {said}. Tables of another program are "
        f"in it, or Nightmill's were changed by hand. {_REMEDY}, or restore a backup"
    )
