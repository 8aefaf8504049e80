"""PostgreSQL with the roles that docs/operations.md makes: who owns, who works, and who lacks a right."""

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseError
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.probing import try_writing
from tests.support.servers import PostgresServer

OPERATIONS = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
CREATED, GRANTED = (
    [statement.strip() for statement in block.split(";") if statement.strip()]
    for block in re.findall(r"^```sql\n(.*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL)
    if "ROLE" in block
)


class Roles:
    """The page's roles and database, under names of their own."""

    def __init__(self, server: PostgresServer) -> None:
        self._admin = server.admin_url
        self._run = uuid.uuid4().hex[:8]
        self.owner, self.worker = f"nightmill_{self._run}", f"miller_{self._run}"

    def execute(self, *statements: str, database: str | None = None) -> None:
        """Run statements of the page as the server's owner."""
        url = self._admin if database is None else self._admin.set(database=database)
        plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True) as connection:
            for statement in statements:
                connection.execute(re.sub(r"\b(nightmill|miller)\b", rf"\1_{self._run}", statement).encode())

    def settings(self, role: str, broker_url: str) -> Settings:
        url: URL = self._admin.set(username=role, password="SECRET", database=self.owner)
        return Settings(
            database_url=url.render_as_string(hide_password=False),
            broker_url=broker_url,
            data_dir=Path("/none"),
        )


@pytest.fixture
def roles(postgres_server: PostgresServer) -> Iterator[Roles]:
    made = Roles(postgres_server)
    made.execute(*CREATED)
    try:
        yield made
    finally:
        made.execute(
            "DROP DATABASE nightmill WITH (FORCE)", "DROP ROLE nightmill", "DROP ROLE IF EXISTS miller"
        )


def test_the_documented_rights_are_enough_and_what_lacks_is_told(roles: Roles, broker_url: str) -> None:
    owner, worker = (roles.settings(role, broker_url) for role in (roles.owner, roles.worker))
    create, *granted = GRANTED
    roles.execute(create, database=roles.owner)
    remedy = r"permission denied for .*\. Give its role the rights that docs/operations\.md lists"
    with Client(owner) as ours, Client(worker) as theirs:
        ours.database.migrate()
        with pytest.raises(DatabaseError, match=remedy):
            theirs.enqueue("a")
        roles.execute(*granted, database=roles.owner)
        try_writing(theirs.database, tables=True)
        assert theirs.get(theirs.enqueue("a")).prompt == "a"
        with ours.database.engine.begin() as connection:  # as a later migration does
            connection.execute(text("CREATE TABLE later (id INTEGER)"))
        with theirs.database.engine.begin() as connection:
            connection.execute(text("INSERT INTO later VALUES (1)"))


def test_a_role_that_may_not_create_tables_is_told(roles: Roles, broker_url: str) -> None:
    """Since PostgreSQL 15 the owner of the database may, and others may not."""
    roles.execute(GRANTED[0], database=roles.owner)
    database = Database(roles.settings(roles.worker, broker_url))
    with pytest.raises(
        DatabaseError, match=r"permission denied for schema public\. Give its role the rights"
    ):
        database.migrate()
    database.close()
