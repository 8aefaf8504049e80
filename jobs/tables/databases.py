"""Databases of the user's: a query as an input, and a table that results are written into.

They are other databases than Nightmill's, or other tables of it. URLs may hold passwords: what is shown and
stored has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.urls import scrubbed, shown_url
from nightmill.jobs.errors import BatchFileError, MissingExtraError

if TYPE_CHECKING:
    from sqlalchemy import Engine

_CONNECT_SECONDS = 30
_FIRST_LINE = 300  # characters of a database's message


class UsersDatabase:
    """A database behind a URL of SQLAlchemy: PostgreSQL or SQLite.

    Raises BatchFileError for others, for a file that is not there, and in `engine` for what the database
    says; MissingExtraError without its driver.
    """

    def __init__(self, url: str) -> None:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        self._secret = url
        self.label = shown_url(url)
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            raise BatchFileError(
                f"{self.label}: is not the URL of a database; write sqlite:////FOLDER/FILE or "
                "postgresql://USER:PASSWORD@HOST/NAME"
            ) from None
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if not self.is_sqlite and parsed.get_backend_name() != "postgresql":
            raise BatchFileError(
                f"{self.label}: cannot be reached from here; known are postgresql:// and sqlite:///"
            )
        if self.is_sqlite and not Path(parsed.database or "").is_file():
            raise BatchFileError(
                f"{self.label}: there is no such file; an empty one (touch FILE) is an empty database"
            )
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        self._url = parsed

    @contextmanager
    def engine(self) -> Iterator["Engine"]:
        """Provide an engine; what goes wrong in the block becomes a BatchFileError of one line."""
        from sqlalchemy import create_engine
        from sqlalchemy.exc import SQLAlchemyError
        from sqlalchemy.pool import NullPool

        try:
            limit = {"timeout" if self.is_sqlite else "connect_timeout": _CONNECT_SECONDS}
            made = create_engine(self._url, poolclass=NullPool, connect_args=limit)
        except ModuleNotFoundError as error:
            said = f"{self.label}: needs the package {error.name!r}: {pip_install('postgres')}"
            raise MissingExtraError(said) from None
        try:
            yield made
        except SQLAlchemyError as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0][:_FIRST_LINE]
            raise BatchFileError(f"{self.label}: {scrubbed(said, self._secret)}") from error
        finally:
            made.dispose()
