"""Connections, transactions and schema version; SQLAlchemy's errors are mapped here."""

import fcntl
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    func,
    literal,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, OperationalError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from nightmill import package_directory
from nightmill.jobs.base.forking import FORK_SECONDS, Forkable, Turnstile
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnreachableError,
)
from nightmill.jobs.sql.engines import READ_ONLY, make_engine
from nightmill.jobs.sql.failures import (
    LOCK_NOT_AVAILABLE,
    first_line,
    is_about_tables,
    mapped,
    refused,
    sqlstate,
)
from nightmill.jobs.sql.patience import long_lasting, seconds_for
from nightmill.jobs.sql.tables import SCHEMA_REVISION
from nightmill.jobs.sql.types import UtcDateTime
from nightmill.jobs.sql.versions import (
    check_complete,
    check_encoding,
    check_not_newer,
    check_revision,
    find_revision,
    not_migrated,
)

Clock = Callable[[], datetime]

_CLOCK_TRUST_SECONDS = 300.0
_SCHEMA_SECONDS = 120.0  # to wait for another's schema check, including the migration of an embedded database
MIGRATION_LOCK_SECONDS = 10
"""Longest wait of a migration for a table that other sessions use; on SQLite it is 30 s for the file's
lock."""
_MIGRATION_LOCK = 0x6E69676874  # PostgreSQL advisory lock: "night"
_ALEMBIC = threading.Lock()  # which keeps what it migrates in variables of its modules


class Database(Forkable):
    """An engine with Nightmill's transaction rules.

    SQLite runs in WAL mode; writing transactions take the write lock when they begin (BEGIN IMMEDIATE),
    so that two writers queue instead of failing half-way. Times are the database server's, since workers
    judge each other's heartbeats by them; pass a `clock` to control time in tests. `monotonic` counts the
    seconds of this process, and goes with the `clock`.

    After os.fork, parent and child have connections of their own. SQLite must not see a fork at all, since
    its locks belong to the process: its connections are closed before.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = settings
        self._clock = clock
        self.monotonic = time.monotonic if clock is None else lambda: clock().timestamp()
        self._server_time: tuple[datetime, float] | None = None  # and when it was read, by _elapsed
        self._schema_revision: str | None = None
        self._schema_lock = threading.Lock()
        self.engine = make_engine(settings)
        self._users = Turnstile()
        self._inherited: list[Any] = []
        self.watch_forks()

    @property
    def pooled(self) -> bool:
        """True if a pooler in transaction mode is used, as detected by a connection or set in the
        settings."""
        if self.is_sqlite:
            return False
        with self._mapped_errors(), self._read_only() as connection:
            return bool(getattr(connection.connection.driver_connection, "pooled", False))

    @property
    def is_sqlite(self) -> bool:
        """True on SQLite, False on PostgreSQL."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a writing transaction; it commits at the end and rolls back on any error."""
        self.ensure_schema()
        with self._mapped_errors(), self._users.passing(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a reading transaction, which blocks no writer."""
        self.ensure_schema()
        with self._mapped_errors(), self._read_only() as connection:
            yield connection

    def now(self) -> datetime:
        """Return the time of the database server's clock (for SQLite, this host's clock).

        PostgreSQL's clock is read occasionally and extrapolated in between: setting this host's clock has no
        effect.
        """
        if self._clock is not None:
            return self._clock()
        if self.is_sqlite:
            return datetime.now(UTC)
        known = self._server_time
        if known is None or _elapsed() - known[1] > _CLOCK_TRUST_SECONDS:
            return self.read_clock()
        return known[0] + timedelta(seconds=_elapsed() - known[1])

    def read_clock(self) -> datetime:
        """Read the database server's clock; `now` extrapolates from the result."""
        if self._clock is not None or self.is_sqlite:
            return self.now()
        with self._mapped_errors(), self._read_only() as connection:
            time = connection.execute(select(func.clock_timestamp())).scalar_one()
            self._server_time = time, _elapsed()
        return self._server_time[0]

    def clock_time(self, ago: timedelta = timedelta()) -> ColumnElement[datetime]:
        """Return an SQL expression for the time, or that time `ago`; PostgreSQL reads its clock when it
        executes it."""
        if self.is_sqlite or self._clock is not None:
            return literal(self.now() - ago, UtcDateTime())
        return func.clock_timestamp(type_=UtcDateTime()) - literal(ago)

    def ensure_schema(self) -> None:
        """Check the schema once; an embedded database is created and migrated if needed."""
        if self._schema_revision == SCHEMA_REVISION:
            return
        with self._turn_to_look():
            # The first use of an embedded database creates it; concurrent users must wait for that.
            with self._file_lock() if self.settings.embedded_database else nullcontext():
                found = self.revision()
                if found != SCHEMA_REVISION and self.settings.embedded_database:
                    self._upgrade()
                    found = self.revision()
            check_revision(found, self.settings.safe_database_url)
            self._schema_revision = found

    @contextmanager
    def _turn_to_look(self) -> Iterator[None]:
        """Let one thread check the schema; raises DatabaseUnreachableError after a while."""
        if not self._schema_lock.acquire(timeout=seconds_for(_SCHEMA_SECONDS)):
            raise DatabaseUnreachableError(
                f"the database at {self.settings.safe_database_url} does not answer: another thread still "
                "waits for its schema. Check that it runs"
            )
        try:
            yield
        finally:
            self._schema_lock.release()

    def revision(self) -> str | None:
        """Return the schema revision in the database; None if it has no Nightmill tables."""
        path = Path(self.engine.url.database or "")
        if (
            self.is_sqlite
            and not str(path).startswith("file:")
            and path.parent.is_dir()
            and not path.exists()
        ):
            return None  # SQLite would make the file, whatever mistake is in its name
        with self._mapped_errors(), self._read_only() as connection:
            return find_revision(connection, self.settings.safe_database_url)

    def migrate(self) -> None:
        """Migrate the schema to this version. Safe to run twice, and in processes and threads at once."""
        with self._file_lock() if self.is_sqlite else nullcontext():
            self._upgrade()

    @long_lasting
    def _upgrade(self) -> None:
        from alembic import command  # 0.2 s to import, needed only here
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
        if self.is_sqlite:
            self._switch_to_wal()
        with self._mapped_errors(), self._users.passing(), self.engine.begin() as connection:
            if not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                # A session that waits for a table's lock blocks all later ones. Set after the lock above,
                # since another migration may take any time.
                connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_LOCK_SECONDS}s'"))
            config.attributes["connection"] = connection
            where = self.settings.safe_database_url
            found = find_revision(connection, where)
            check_not_newer(found, where)
            if found is None:  # one that is in use is migrated all the same
                check_encoding(connection, where)
            try:
                with _ALEMBIC:
                    command.upgrade(config, "head")
                check_complete(connection, where)
            except DBAPIError as error:
                if is_about_tables(error):
                    raise not_migrated(self.settings.scrubbed(first_line(error.orig)), where) from error
                if sqlstate(error) != LOCK_NOT_AVAILABLE:
                    raise
                raise DatabaseBusyError(
                    f"the database at {where} was not migrated, and is as it was: "
                    f"other sessions held locks on its tables for {MIGRATION_LOCK_SECONDS} s. Stop workers, "
                    "servers and programs, look for open transactions in pg_stat_activity, and try again"
                ) from error

    def close(self) -> None:
        """Close pooled connections."""
        self.engine.dispose()

    # -- forks -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close SQLite's connections, once the transactions of other threads are over."""
        if self.is_sqlite:
            self._users.close(FORK_SECONDS)
            self.engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Allow transactions again."""
        if self.is_sqlite:
            self._users.open()

    def after_fork_in_child(self) -> None:
        """Abandon the parent's connections: closing one would end the parent's session."""
        self._inherited.append(self.engine.pool)
        self.engine.dispose(close=False)
        self._users = Turnstile()
        self._schema_lock = threading.Lock()

    # -- helpers ---------------------------------------------------------------------------------

    @contextmanager
    def _read_only(self) -> Iterator[Connection]:
        with self._users.passing(), self.engine.connect() as connection:
            yield connection.execution_options(**{READ_ONLY: True})

    def _switch_to_wal(self) -> None:
        """Switch SQLite to WAL, which is stored in the file and needs exclusive access once."""
        with self._mapped_errors(), self._users.passing():
            connection = self.engine.raw_connection()  # outside any transaction
            try:
                connection.cursor().execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                raise self._mapped(OperationalError("PRAGMA journal_mode", None, error)) from error
            finally:
                connection.close()

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Lock a SQLite file for its migration; others wait."""
        path = Path(str(self.settings.resolved_database_url.database))
        try:
            lock = path.with_name(f"{path.name}.migrate.lock").open("w")
        except OSError as error:
            remedy = "" if path.parent.exists() else f". There is no folder {path.parent}: make it"
            raise DatabaseUnreachableError(
                f"the database at {self.settings.safe_database_url} cannot be opened: "
                f"{error.strerror or error}{remedy}"
            ) from error
        with lock:
            self._take_turn(lock)
            try:
                yield
            finally:  # closing would not unlock it: a child forked meanwhile has the file open, too
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _take_turn(self, lock: Any) -> None:
        """Wait until nobody else migrates, by polling, since flock has no timeout."""
        give_up_at = time.monotonic() + seconds_for(_SCHEMA_SECONDS)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise DatabaseUnreachableError(
                        f"the database at {self.settings.safe_database_url} is being migrated by another "
                        "program: try again once that is done"
                    ) from None
                time.sleep(0.02)
            else:
                return

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except StatementError as error:
            raise self._mapped(error) from error
        except (UnicodeEncodeError, OverflowError) as error:  # raised by drivers for a value
            raise refused(error, self.settings) from error
        except PoolTimeoutError as error:
            said = first_line(error)
            raise DatabaseUnreachableError(
                f"all connections to the database at {self.settings.safe_database_url} are busy: {said}"
            ) from error

    def _mapped(self, error: StatementError) -> DatabaseError:
        return mapped(error, self.settings)


def _elapsed() -> float:
    """Return seconds that also count while this host is suspended, if the system supports that."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def migrations_dir() -> Path:
    """Return the directory of the Alembic scripts."""
    return package_directory() / "_migrations"
