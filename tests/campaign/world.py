"""The servers and the settings of a night under fire, and what may be done to the servers."""

import os
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from nightmill.jobs.client import Client
from nightmill.jobs.settings import Settings
from tests.campaign import history, model
from tests.campaign.plan import STALE
from tests.servers import PostgresServer, RedisServer, start_postgres, start_redis, wait_until, worker_env

WORKER = {
    "reference": True,
    "shard_size": 8,
    "max_sequences": 16,
    "heartbeat_seconds": 0.5,
    "stale_seconds": STALE,
    "resend_seconds": 3.0,
    "drain_seconds": 4.0,
    "save_seconds": 0.5,
}
STEP_SECONDS = 0.01


class World:
    """A database (`postgresql` or `sqlite`), a Redis, a model file, and a folder for all of it."""

    def __init__(self, database: str) -> None:
        self.database = database
        self._stack = ExitStack()
        self.trouble_until = 0.0  # the database may fail calls until then
        self.lock: sqlite3.Connection | None = None
        self._redis_lock = threading.Lock()

    def __enter__(self) -> Self:
        self.home = Path(tempfile.mkdtemp(prefix="nightmill-campaign-"))
        self.redis: RedisServer = self._stack.enter_context(start_redis(self.home / "redis"))
        if self.database == "postgresql":
            self.postgres = PostgresControl(self._stack.enter_context(start_postgres()))
            self._stack.callback(self.postgres.stop)
            url = self.postgres.create_database()
        else:
            url = f"sqlite:///{self.home / 'night.db'}"
        self.settings = Settings(
            data_dir=self.home / "data", database_url=url, broker_url=self.redis.url,
            model=model.write(self.home / "bytes.gguf"), **WORKER,
        )  # fmt: skip
        with Client(self.settings) as client:
            client.database.migrate()
        self.engine: Engine = create_engine(self.settings.resolved_database_url, pool_pre_ping=True)
        history.install(self.engine)
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.dispose()
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """For workers and clients of their own."""
        mark = {"CAMPAIGN_HOME": str(self.home), "CAMPAIGN_STEP": str(STEP_SECONDS)}
        return worker_env(self.settings) | mark

    def trouble(self, seconds: float = 45.0) -> None:
        """From now on, for so long, a caller may be told that the database does not answer."""
        self.trouble_until = max(self.trouble_until, time.monotonic() + seconds)

    @property
    def troubled(self) -> bool:
        return time.monotonic() < self.trouble_until

    def sql(self, statement: str, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """Run a statement of the campaign's own, past any outage; returns its rows."""
        give_up_at = time.monotonic() + 60.0
        while True:
            try:
                with self.engine.begin() as connection:
                    done = connection.execute(text(statement), values or {})
                    return done.all() if done.returns_rows else []
            except OperationalError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.2)

    # -- Redis -------------------------------------------------------------------------------------

    def kill_redis(self) -> None:
        """As kill -9."""
        with self._redis_lock:
            self.redis.stop()

    def revive_redis(self) -> None:
        """Start it where it does not run, continue it where it stands still."""
        with self._redis_lock:
            process = self.redis._process
            if process is None:
                self.redis.start()
            else:
                process.send_signal(signal.SIGCONT)

    def freeze_redis(self) -> None:
        """SIGSTOP."""
        with self._redis_lock:
            if self.redis._process is not None:
                self.redis._process.send_signal(signal.SIGSTOP)

    # -- SQLite ------------------------------------------------------------------------------------

    def hold_write_lock(self) -> None:
        """Let nobody else write; nothing where a process that was frozen holds the lock already."""
        self.release_write_lock()
        self.lock = sqlite3.connect(
            self.home / "night.db", timeout=0.5, isolation_level=None, check_same_thread=False
        )
        try:
            self.lock.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self.release_write_lock()

    def release_write_lock(self) -> None:
        """Undo it."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None


class PostgresControl:
    """Restarts a server in place, and cuts its connections."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            # What was acknowledged must survive an immediate shutdown of the server, if not of the machine.
            connection.execute("ALTER SYSTEM RESET synchronous_commit")
            connection.execute("SELECT pg_reload_conf()")
            row = connection.execute("SHOW data_directory").fetchone()
        assert row is not None
        self._directory = Path(row[0])
        process = self._postmaster()
        self._command, self._uid, self._gid = process.cmdline(), process.uids().real, process.gids().real

    def create_database(self) -> str:
        """A new database's URL."""
        return self._server.create_database()

    def set(self, name: str, value: object) -> None:
        """Change a setting of the server, and restart it."""
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        self.restart(signal.SIGINT)

    def restart(self, number: signal.Signals) -> None:
        """SIGINT: fast, as `systemctl restart` does; SIGQUIT: immediate, as after a crash."""
        process = self._postmaster()
        process.send_signal(number)
        with suppress(psutil.NoSuchProcess):
            wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, 60, "the end of PostgreSQL")
        with (self._directory / "campaign.log").open("a") as log:
            log.flush()
            subprocess.Popen(
                self._command, cwd="/", user=self._uid if os.getuid() == 0 else None,
                group=self._gid if os.getuid() == 0 else None, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, 60, "PostgreSQL's return")

    def drop_connections(self) -> None:
        """End every session but this one."""
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    def stop(self) -> None:
        """End the server, which is another process than the one that was started first."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            self._postmaster().send_signal(signal.SIGQUIT)

    def _postmaster(self) -> psutil.Process:
        return psutil.Process(int((self._directory / "postmaster.pid").read_text().split()[0]))

    def _dsn(self) -> str:
        return self._server.admin_url.set(drivername="postgresql").render_as_string(hide_password=False)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._dsn(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True
