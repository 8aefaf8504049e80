"""The command line in this process, on the settings of a test; databases without tables."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.sql.database import Database
from tests.support.servers import worker_env

Run = Callable[..., Result]


@pytest.fixture
def run(sqlite_settings: Settings) -> Run:
    """Runs `nightmill ARGUMENTS` in this process, with the settings of the test."""

    def invoke(*arguments: str, stdin: str | None = None, **more: str) -> Result:
        env = worker_env(sqlite_settings) | more
        return CliRunner().invoke(main, list(arguments), input=stdin, env=env)

    return invoke


@pytest.fixture
def cli_client(sqlite_settings: Settings) -> Client:
    """A client beside the command."""
    return Client(sqlite_settings)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, directory: Path) -> Iterator[Database]:
    """A configured database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{directory}/empty.db"
    else:
        url = request.getfixturevalue("empty_postgres_url")
    database = Database(Settings(database_url=url, data_dir=directory))
    yield database
    database.close()
