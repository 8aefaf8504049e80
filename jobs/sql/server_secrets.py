"""Random secrets shared by the servers of one database, each created on first use."""

import secrets
from typing import cast

from sqlalchemy import Table, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.http_tables import ServerSecretRow
from nightmill.jobs.sql.retrying import retried

SESSIONS = "sessions"
"""Name of the secret that seals browser sessions."""
_BYTES = 32
_TABLE = cast(Table, ServerSecretRow.__table__)


class ServerSecrets:
    """The secrets in SQL. A deleted secret is replaced at the next use."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, name: str) -> bytes:
        """Return the secret of this name, the same for all servers. Raises DatabaseError."""
        return self._find(name) or self._make(name)

    def _find(self, name: str) -> bytes | None:
        with self._database.read() as connection:
            query = select(ServerSecretRow.value).where(ServerSecretRow.name == name)
            return connection.execute(query).scalar_one_or_none()

    @retried
    def _make(self, name: str) -> bytes:
        """Insert a new secret unless another server was faster; returns the stored one."""
        now = self._database.now()
        insert = sqlite_insert if self._database.is_sqlite else postgresql_insert
        adding = insert(_TABLE).values(name=name, value=secrets.token_bytes(_BYTES), created_at=now)
        with self._database.write() as connection:
            connection.execute(adding.on_conflict_do_nothing(index_elements=["name"]))
            query = select(ServerSecretRow.value).where(ServerSecretRow.name == name)
            return connection.execute(query).scalar_one()
