"""Connections, transactions and schema version: the one border where SQLAlchemy's errors are mapped."""

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
    inspect,
    literal,
    select,
    text,
)
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from nightmill import package_directory
from nightmill.jobs.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseRefusedError,
    DatabaseUnreachableError,
    SchemaError,
)
from nightmill.jobs.forking import FORK_SECONDS, Forkable, Turnstile
from nightmill.jobs.settings import Settings
from nightmill.jobs.sql.engines import READ_ONLY, make_engine
from nightmill.jobs.sql.patience import long_lasting, seconds_for
from nightmill.jobs.sql.tables import SCHEMA_REVISION, UtcDateTime

Clock = Callable[[], datetime]

_CLOCK_TRUST_SECONDS = 300.0
_SCHEMA_SECONDS = 120.0  # for another's look at the schema, and for the migration of an embedded database
# Deadlock, serialization failure, lock timeout: PostgreSQL has rolled back, and the next try may succeed.
_LOCK_NOT_AVAILABLE = "55P03"
_LOST_TO_OTHERS = ("40P01", "40001", _LOCK_NOT_AVAILABLE)
MIGRATION_LOCK_SECONDS = 10
"""A migration waits so long for a table that other sessions use; on SQLite 30 s for the file's lock."""
_MIGRATION_LOCK = 0x6E69676874  # PostgreSQL advisory lock: "night"


class Database(Forkable):
    """One engine with Nightmill's transaction rules.

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
    def is_sqlite(self) -> bool:
        """True on SQLite, False on PostgreSQL."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A writing transaction; commits at the end, rolls back on any error."""
        self.ensure_schema()
        with self._mapped_errors(), self._users.passing(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A reading transaction, which blocks no writer."""
        self.ensure_schema()
        with self._mapped_errors(), self._read_only() as connection:
            yield connection

    def now(self) -> datetime:
        """The time, by the database server's clock (by this host's for SQLite, which is the same).

        PostgreSQL's is read now and then, and counted on from there: setting this host's matters nothing.
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
        """The time, by the database server's clock at this moment; `now` counts on from there."""
        if self._clock is not None or self.is_sqlite:
            return self.now()
        with self._mapped_errors(), self._read_only() as connection:
            time = connection.execute(select(func.clock_timestamp())).scalar_one()
            self._server_time = time, _elapsed()
        return self._server_time[0]

    def clock_time(self, ago: timedelta = timedelta()) -> ColumnElement[datetime]:
        """The time, or what it was `ago`, inside a statement: PostgreSQL reads its clock as it runs it."""
        if self.is_sqlite or self._clock is not None:
            return literal(self.now() - ago, UtcDateTime())
        return func.clock_timestamp(type_=UtcDateTime()) - literal(ago)

    def ensure_schema(self) -> None:
        """Check once that the schema is ours; an embedded database is created and migrated on the way."""
        if self._schema_revision == SCHEMA_REVISION:
            return
        with self._turn_to_look():
            # The first use of an embedded database creates it; those who come meanwhile must not look yet.
            with self._file_lock() if self.settings.embedded_database else nullcontext():
                found = self.revision()
                if found != SCHEMA_REVISION and self.settings.embedded_database:
                    self._upgrade()
                    found = self.revision()
            if found is None:
                raise SchemaError(
                    f"the database at {self.settings.safe_database_url} has no Nightmill tables: "
                    "run `nightmill migrate`"
                )
            if found != SCHEMA_REVISION:
                raise SchemaError(
                    f"the database at {self.settings.safe_database_url} has schema {found}, this version of "
                    f"Nightmill needs {SCHEMA_REVISION}: run `nightmill migrate`, or install the version "
                    "of Nightmill that the other programs use"
                )
            self._schema_revision = found

    @contextmanager
    def _turn_to_look(self) -> Iterator[None]:
        """One thread looks at the schema; raises DatabaseUnreachableError after a while."""
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
        """The schema revision found in the database; None if it has no Nightmill tables."""
        with self._mapped_errors(), self._read_only() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()

    def migrate(self) -> None:
        """Bring the schema to this version. Safe to run twice, and from several processes at once."""
        with self._file_lock() if self.is_sqlite else nullcontext():
            self._upgrade()

    @long_lasting
    def _upgrade(self) -> None:
        from alembic import command  # 0.2 s to import, needed only here
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
        if self.is_sqlite:
            self._switch_to_wal()
        with self._mapped_errors(), self._users.passing(), self.engine.begin() as connection:
            if not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                # Who waits for a table's lock has all who come later wait behind it. After the lock above,
                # since another migration may take as long as it takes.
                connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_LOCK_SECONDS}s'"))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                said = _first_line(error)
                raise SchemaError(
                    f"the database at {self.settings.safe_database_url} cannot be migrated: {said}. It "
                    "seems to belong to a newer version of Nightmill: install the one that others use"
                ) from error
            except DBAPIError as error:
                if _sqlstate(error) != _LOCK_NOT_AVAILABLE:
                    raise
                raise DatabaseBusyError(
                    f"the database at {self.settings.safe_database_url} was not migrated, and is as it was: "
                    f"other sessions held locks on its tables for {MIGRATION_LOCK_SECONDS} s. Stop workers, "
                    "servers and programs, look for open transactions in pg_stat_activity, and try again"
                ) from error

    def close(self) -> None:
        """Close pooled connections."""
        self.engine.dispose()

    # -- forks -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close what SQLite has open, once the transactions of other threads are over."""
        if self.is_sqlite:
            self._users.close(FORK_SECONDS)
            self.engine.dispose()

    def after_fork_in_parent(self) -> None:
        """Let transactions begin again."""
        if self.is_sqlite:
            self._users.open()

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone for good: closing one would end the parent's session."""
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
        """Readers and a writer at once. The file remembers it; the switch needs the file to itself."""
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
        """SQLite files are migrated by whoever comes first; the others wait for it."""
        path = Path(str(self.settings.resolved_database_url.database))
        try:
            lock = path.with_name(f"{path.name}.migrate.lock").open("w")
        except OSError as error:
            raise DatabaseUnreachableError(
                f"the database at {self.settings.safe_database_url} cannot be opened: {error}"
            ) from error
        with lock:
            self._take_turn(lock)
            try:
                yield
            finally:  # closing would not do: a child forked meanwhile has the file open, too
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _take_turn(self, lock: Any) -> None:
        """Wait until nobody else migrates; looks again and again, since flock itself has no limit."""
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
        except (UnicodeEncodeError, OverflowError) as error:  # drivers raise them for a value, as they are
            raise self._refused(error) from error
        except PoolTimeoutError as error:
            said = _first_line(error)
            raise DatabaseUnreachableError(
                f"all connections to the database at {self.settings.safe_database_url} are busy: {said}"
            ) from error

    def _mapped(self, error: StatementError) -> DatabaseError:
        """An outage, a refusal of the statement's values, or neither: tables that lack, our own mistake."""
        where = self.settings.safe_database_url
        said = self.settings.scrubbed(_first_line(error.orig or error))
        if _lost_to_others(error.orig):
            return DatabaseBusyError(
                f"the database at {where} is busy: {said}. Other programs hold the same rows, or its lock; "
                "several tries did not help"
            )
        if _is_refusal(error):
            return self._refused(error.orig or error)
        if "no such table" in said or (isinstance(error, ProgrammingError) and "does not exist" in said):
            return SchemaError(f"the database at {where} lacks a table ({said}): run `nightmill migrate`")
        if _sqlstate(error)[:2] in _UNWILLING:
            return DatabaseUnreachableError(f"the database at {where} takes nothing now: {said}")
        if isinstance(error, OperationalError | InterfaceError):
            return DatabaseUnreachableError(
                f"the database at {where} does not answer: {said}. Check that it runs and that "
                "NIGHTMILL_DATABASE_URL is right"
            )
        return DatabaseError(f"the database at {where} refused a statement: {said}")

    def _refused(self, error: BaseException) -> DatabaseRefusedError:
        where, said = self.settings.safe_database_url, self.settings.scrubbed(_first_line(error))
        return DatabaseRefusedError(f"the database at {where} refused a statement: {said}")


# Classes of PostgreSQL's error codes, https://www.postgresql.org/docs/current/errcodes-appendix.html
_REFUSING = (
    "22",
    "23",
    "54",
)  # data exception, integrity constraint, program limit (as a too long index entry)
_UNWILLING = ("25", "53")  # read-only, insufficient resources (disk full, too many connections)


def _is_refusal(error: StatementError) -> bool:
    """Whether the same values would be refused at any time, so that trying again is of no use."""
    if not isinstance(error, DBAPIError):
        return True  # SQLAlchemy could not make parameters of the values
    if isinstance(error, DataError | IntegrityError):
        return True
    binding = isinstance(error, InterfaceError | ProgrammingError) and "binding parameter" in str(error.orig)
    return binding or _sqlstate(error)[:2] in _REFUSING


def _sqlstate(error: StatementError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _lost_to_others(error: BaseException | None) -> bool:
    """Whether a statement failed since other transactions were in its way, and may succeed the next time."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the details of extended codes
        return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return getattr(error, "sqlstate", None) in _LOST_TO_OTHERS


def _elapsed() -> float:
    """Seconds, counted also while this host is suspended (if the system can)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _first_line(error: BaseException | None) -> str:
    """What a foreign error says, to go before a full stop or the end."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def migrations_dir() -> Path:
    """Where the Alembic scripts are."""
    return package_directory() / "_migrations"
