"""Session settings of connections to PostgreSQL, independent of the defaults of a database or role.

They are set once, at the beginning of a connection. A pooler in transaction mode, such as pgbouncer, shares
sessions between clients: there they are set for each transaction, nothing is left behind, and no statement is
prepared, which would exist in one session only. Such a pooler is detected by the id of the server's process:
the pooler invents the one that a connection is told at first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nightmill.jobs.base.settings import Pooler

_IDLE_SECONDS: Final = 30
"""Idle time in a transaction after which the server ends it; transactions here are never slow between
statements."""

_RELIED_ON: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "standard_conforming_strings": "on",
    "extra_float_digits": "1",
    # If a client vanishes and continues on another connection, that one waits for rows locked by the old
    # transaction until the server gives that up.
    "idle_in_transaction_session_timeout": str(1000 * _IDLE_SECONDS),
}
_STATEMENT_TIMEOUT: Final = "statement_timeout"  # a statement ends by the clock of its client


@dataclass(frozen=True, slots=True)
class Session:
    """The setup of sessions.

    pooler     whether connections go through a pooler in transaction mode, or auto
    keepalive  the server's TCP options for detecting dead clients
    options    the URL's options for the server, which may contain a statement timeout
    """

    pooler: Pooler
    keepalive: Mapping[str, int]
    options: str = ""

    def opening(self, pid: int) -> str:
        """Return the statement for a new connection, which returns the id of the server's process.

        It changes nothing if that is not `pid` while a pooler is being detected.
        """
        values = self._values() | {name: str(value) for name, value in self.keepalive.items()}
        condition = f"pid = {pid}" if self.pooler == "auto" else "true"
        settings = ", ".join(
            f"CASE WHEN {condition} THEN {_set_config(name, value, local=False)} END"
            for name, value in values.items()
        )
        return f"SELECT pid, {settings} FROM pg_backend_pid() AS pid"  # noqa: S608 - made of constants

    def beginning(self) -> str:
        """Return the same settings for the beginning of a transaction, for its duration."""
        settings = ", ".join(_set_config(name, value, local=True) for name, value in self._values().items())
        return f"SELECT pg_backend_pid(), {settings}"

    def _values(self) -> dict[str, str]:
        limit = {} if _STATEMENT_TIMEOUT in self.options else {_STATEMENT_TIMEOUT: "0"}
        return dict(_RELIED_ON) | limit


def _set_config(name: str, value: str, *, local: bool) -> str:
    return f"set_config('{name}', '{value}', {str(local).lower()})"
