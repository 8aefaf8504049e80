"""SQLAlchemy engines, and the settings of connections to each kind of database."""

import math
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.settings import Settings, make_data_dir
from nightmill.jobs.base.urls import NEVER, PREPARE_THRESHOLD
from nightmill.jobs.errors import DatabaseError, MissingExtraError, SettingsError
from nightmill.jobs.sql.hints import HintingCompiler
from nightmill.jobs.sql.json_columns import dump_json, load_json, load_json_or_text
from nightmill.jobs.sql.patience import (
    CONNECT_SECONDS,
    KEEPALIVE,
    PING_SECONDS,
    SERVER_KEEPALIVE,
    STATEMENT_SECONDS,
    bounded_connection,
    patience,
    seconds_for,
)
from nightmill.jobs.sql.sessions import Session

READ_ONLY = "nightmill_read_only"
"""Execution option of connections for reading transactions."""
_BUSY = "nightmill_busy_timeout"  # busy timeout of a SQLite connection, in milliseconds


def make_engine(settings: Settings) -> Engine:
    """Create the engine for the configured database; raises SettingsError, MissingExtraError and
    DatabaseError."""
    url = settings.resolved_database_url
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise DatabaseError(
                "NIGHTMILL_DATABASE_URL names an in-memory SQLite, which other processes cannot see: "
                "name a file, as in sqlite:////var/lib/nightmill/nightmill.db"
            )
        path = Path(str(url.database))
        if settings.embedded_database:
            make_data_dir(path.parent)
        engine = create_engine(
            url,
            json_serializer=dump_json,
            json_deserializer=load_json_or_text,
            connect_args={"timeout": STATEMENT_SECONDS},
        )
        engine.dialect.statement_compiler = HintingCompiler
        _apply_sqlite_rules(engine)
        return engine
    try:
        url, options = _driver_options(url)
        engine = create_engine(
            url,
            # Required by the statements, whatever the database's default is.
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=5,
            max_overflow=10,
            pool_timeout=CONNECT_SECONDS,
            json_serializer=dump_json,
            json_deserializer=load_json,
            connect_args=options,
        )
        said = str(url.query.get("options", ""))
        _apply_postgresql_rules(engine, Session(settings.database_pooler, SERVER_KEEPALIVE, said))
        return engine
    except ArgumentError as error:
        raise SettingsError(f"NIGHTMILL_DATABASE_URL: {settings.scrubbed(error)}") from None
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"PostgreSQL needs the package {error.name!r}: {pip_install('postgres')}"
        ) from None


def _driver_options(url: URL) -> tuple[URL, dict[str, Any]]:
    """Split a URL into one without the driver's own parameters, and the options for the driver."""
    options: dict[str, Any] = {name: value for name, value in KEEPALIVE.items() if name not in url.query}
    if threshold := url.query.get(PREPARE_THRESHOLD):
        options[PREPARE_THRESHOLD] = None if threshold == NEVER else int(str(threshold))
    return url.difference_update_query([PREPARE_THRESHOLD]), options


def _apply_postgresql_rules(engine: Engine, session: Session) -> None:
    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: object, args: Any, options: dict[str, Any]) -> Any:
        timeout = float(options.get("connect_timeout", CONNECT_SECONDS))
        options["connect_timeout"] = math.ceil(seconds_for(timeout if timeout > 0.0 else CONNECT_SECONDS))
        return bounded_connection().connect_again(args, options, session)

    beginning = session.beginning()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.pooled:
            found = connection.exec_driver_sql(beginning, execution_options={"no_parameters": True})
            driver.server_pid = found.first()[0]  # type: ignore[index]  # it is one row

    ping = engine.dialect.do_ping

    def bounded_ping(connection: Any) -> bool:
        with patience(PING_SECONDS):
            return ping(connection)

    engine.dialect.do_ping = bounded_ping  # type: ignore[method-assign,assignment]  # SQLAlchemy has no event for it


def _apply_sqlite_rules(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # on_begin begins transactions instead of pysqlite
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        busy = math.ceil(1000 * seconds_for(STATEMENT_SECONDS))
        if connection.info.get(_BUSY) != busy:  # the caller's time to wait for the write lock
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {busy}")
            connection.info[_BUSY] = busy
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
