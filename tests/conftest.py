"""Fixtures that every test may use: real servers, isolated settings, clients with a clock of ours.

`NIGHTMILL_TEST_REDIS_URL` (its database is emptied) and `NIGHTMILL_TEST_DATABASE_URL` (of a role that may
create databases) name servers to use instead of those from the wheels. Nothing here
skips: a server that does not start is an error. What else tests need is in `tests/support/needs.py`.
"""

import gc
import multiprocessing
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import redis
from sqlalchemy.engine import make_url

from nightmill import jobs
from nightmill.jobs.base.settings import FOREIGN_PREFIXES, PREFIX, Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BrokerError
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.jobs.sql.database import Database
from tests.support import leftovers, needs
from tests.support.servers import (
    Clock,
    PostgresServer,
    RedisServer,
    scratch_database,
    scratch_directory,
    start_postgres,
    start_redis,
)

# Products of test size are not worth a second BLAS thread, which waits by spinning on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

gc.disable()  # until all tests are collected
# Processes that race begin with what they all import; pytest is for the modules that they are in.
multiprocessing.set_forkserver_preload(["nightmill.jobs.client.client", "psycopg", "pytest"])

_LONGEST_NAME = 20
# Tests that start workers or wait for what hangs: begun last, one would keep its process for a minute. The
# longest first.
LONG = tuple(
    Path(__file__).parent / one
    for one in (
        "integration/test_installing.py",
        "integration/test_packaging.py",
        "acceptance",
        "clients",
        "integration/worker",
        "integration/server",
        "unit/campaign",
    )
)

_SERVERS = {"redis_url", "redis_server", "postgres_server", "chromium"}
_SERVED = Path(__file__).parent / "unit" / "server"

REDIS_URL = os.environ.get("NIGHTMILL_TEST_REDIS_URL")
DATABASE_URL = os.environ.get("NIGHTMILL_TEST_DATABASE_URL")

hypothesis.settings.register_profile("nightmill", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("nightmill")


_WATCH = pytest.StashKey[leftovers.Watch]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a need that does not exist before a test runs; mark what is started from now on."""
    needs.required()
    if (
        not hasattr(config, "workerinput") and not config.option.collectonly
    ):  # of several processes, the first
        config.stash[_WATCH] = leftovers.Watch()


def pytest_sessionstart(session: pytest.Session) -> None:
    """What works in the session's temporary folders is the session's, too."""
    if watch := session.config.stash.get(_WATCH, None):
        factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        watch.add(factory.getbasetemp())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A session that leaves processes behind has failed: servers would be there until the machine is off."""
    if watch := session.config.stash.get(_WATCH, None):
        left = watch.left_behind()
        session.config.stash[_LEFT] = leftovers.described(left)
        leftovers.end(left)
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left to watch for."""
    if watch := config.stash.get(_WATCH, None):
        watch.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left running, and how many tests were skipped for want of what."""
    if left := terminalreporter.config.stash.get(_LEFT, None):
        terminalreporter.section("left behind, and ended now", red=True)
        for line in left:
            terminalreporter.write_line(line, red=True)
    skipped = terminalreporter.stats.get("skipped", [])
    if lines := needs.summary(str(report.longrepr) for report in skipped):
        terminalreporter.section("not tested here")
        for line in lines:
            terminalreporter.write_line(line, yellow=True)


@cache
def _is_below(path: Path, *folders: Path) -> bool:
    """Of a module: asked for each of its tests, of which there are thousands."""
    return any(map(path.is_relative_to, folders))


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Whatever starts a server or a browser is `heavy`; other modules and tests say so themselves."""
    if _SERVERS.intersection(getattr(item, "fixturenames", ())) or _is_below(item.path, _SERVED):
        item.add_marker(pytest.mark.heavy)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several test processes each begins with its share of the long tests, so that all end together.

    pytest-xdist gives each an equal, connected part of the list, of which idle ones then take from the end.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    long = [item for folder in LONG for item in items if _is_below(item.path, folder)]
    short = [item for item in items if not _is_below(item.path, *LONG)]
    ordered: list[pytest.Item] = []
    for process in range(processes):
        share = long[process::processes]
        end = len(items) * (process + 1) // processes - len(ordered) - len(share)
        ordered += share + short[:end]
        del short[:end]
    items[:] = ordered + short


def pytest_collection_finish() -> None:
    """Python's collector visits what all test modules and their imports have made neither while they make it,
    a tenth of the time that this takes, nor ever again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _developers_environment_stays_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No NIGHTMILL_* variable reaches a test, and no test reaches the data directory of a person."""
    for name in list(os.environ):
        if name.startswith(PREFIX) and not name.startswith(FOREIGN_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "xdg-data"))
    jobs.default_client.cache_clear()
    yield
    if jobs.default_client.cache_info().currsize:
        jobs.default_client().close()
        jobs.default_client.cache_clear()


@pytest.fixture(scope="session")
def session_directory() -> Iterator[Path]:
    """A directory (in memory, where possible) for the files of servers and databases."""
    directory = scratch_directory()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def directory(request: pytest.FixtureRequest, session_directory: Path) -> Iterator[Path]:
    """As `tmp_path`, but in memory where possible: for what waits for the disk at every commit.

    Its name says which test has left a server there, as far as the path of a socket has room.
    """
    name = re.sub(r"\W", "_", request.node.name.removeprefix("test_"))[:_LONGEST_NAME]
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=session_directory))
    yield path
    for lock in path.rglob("redis/server.lock"):  # the embedded Redis outlives whoever has started it
        with suppress(BrokerError):  # a silent one is ended with the session, which then says so
            EmbeddedRedis(lock.parent.parent).stop()
    shutil.rmtree(path, ignore_errors=True)


# -- servers -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def redis_url(session_directory: Path) -> Iterator[str]:
    """A Redis for the whole session; tests that use `broker_url` find it empty."""
    if REDIS_URL:
        yield REDIS_URL
        return
    with start_redis(session_directory / "redis") as server:
        yield server.url


@pytest.fixture
def broker_url(redis_url: str) -> str:
    """The URL of an empty Redis."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    return redis_url


@pytest.fixture
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own, to be stopped and started."""
    with start_redis(directory / "own-redis") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL for the whole session."""
    with PostgresServer(make_url(DATABASE_URL)) if DATABASE_URL else start_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a migrated PostgreSQL database, to be copied."""
    with scratch_database(postgres_server) as url:
        _migrate(Settings(database_url=url))
        yield url


@pytest.fixture(scope="session")
def sqlite_template(session_directory: Path) -> Path:
    """A migrated SQLite file, to be copied."""
    path = session_directory / "template.db"
    _migrate(Settings(database_url=f"sqlite:///{path}"))
    return path


def _migrate(settings: Settings) -> None:
    database = Database(settings)
    database.migrate()
    database.close()


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a PostgreSQL database without tables."""
    with scratch_database(postgres_server) as url:
        yield url


# -- settings and clients ------------------------------------------------------------------------


@pytest.fixture(params=["embedded", "postgresql"])
def settings(request: pytest.FixtureRequest, directory: Path, broker_url: str) -> Iterator[Settings]:
    """Migrated databases: the embedded SQLite, PostgreSQL. With a real Redis."""
    yield from _settings(request.param, request, directory, broker_url)


@pytest.fixture(params=["sqlite", "postgresql"])
def server_settings(request: pytest.FixtureRequest, directory: Path, broker_url: str) -> Iterator[Settings]:
    """As `settings`, but a SQLite that a URL names in place of the embedded one."""
    yield from _settings(request.param, request, directory, broker_url)


@pytest.fixture
def sqlite_settings(request: pytest.FixtureRequest, directory: Path, broker_url: str) -> Iterator[Settings]:
    """As `settings`, on SQLite only: for tests in which the database plays no part."""
    yield from _settings("sqlite", request, directory, broker_url)


@pytest.fixture
def postgres_settings(request: pytest.FixtureRequest, directory: Path, broker_url: str) -> Iterator[Settings]:
    """As `settings`, on PostgreSQL only: for what can happen only where transactions run side by side."""
    yield from _settings("postgresql", request, directory, broker_url)


def _settings(
    kind: str, request: pytest.FixtureRequest, directory: Path, broker_url: str
) -> Iterator[Settings]:
    data_dir = directory / "data"
    data_dir.mkdir()
    if kind == "postgresql":
        template = request.getfixturevalue("postgres_template")
        with scratch_database(request.getfixturevalue("postgres_server"), template) as url:
            yield Settings(data_dir=data_dir, database_url=url, broker_url=broker_url)
        return
    path = data_dir / "nightmill.db" if kind == "embedded" else directory / "configured.db"
    shutil.copy(request.getfixturevalue("sqlite_template"), path)
    configured = None if kind == "embedded" else f"sqlite:///{path}"
    yield Settings(data_dir=data_dir, database_url=configured, broker_url=broker_url)


@pytest.fixture
def clock() -> Clock:
    """A clock that moves only when told to; `client` tells the time by it."""
    return Clock()


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Iterator[Client]:
    """A client on each kind of database."""
    with Client(settings, clock=clock) as made:
        yield made


@pytest.fixture
def sqlite_client(sqlite_settings: Settings, clock: Clock) -> Iterator[Client]:
    """A client on SQLite only."""
    with Client(sqlite_settings, clock=clock) as made:
        yield made


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it is sent."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(100):
                connection.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listening.getsockname()
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
