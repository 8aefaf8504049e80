"""Engines: how connections to each kind of database are made, and what holds for all of them."""

import json
import math
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError

from nightmill.jobs.errors import DatabaseError, MissingExtraError, SettingsError
from nightmill.jobs.settings import Settings, make_data_dir
from nightmill.jobs.sql.patience import (
    CONNECT_SECONDS,
    KEEPALIVE,
    PING_SECONDS,
    STATEMENT_SECONDS,
    bounded_connection,
    patience,
    seconds_for,
)

READ_ONLY = "nightmill_read_only"
"""The execution option of connections whose transactions only read."""
_BUSY = "nightmill_busy_timeout"  # of a connection to SQLite, in milliseconds


def make_engine(settings: Settings) -> Engine:
    """An engine for the configured database; raises SettingsError, MissingExtraError and DatabaseError."""
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
        engine = create_engine(url, json_deserializer=_load_json, connect_args={"timeout": STATEMENT_SECONDS})
        _apply_sqlite_rules(engine)
        return engine
    try:
        options = {name: value for name, value in KEEPALIVE.items() if name not in url.query}
        engine = create_engine(
            url,
            pool_pre_ping=True,
            pool_size=5,
            max_overflow=10,
            pool_timeout=CONNECT_SECONDS,
            connect_args=options,
        )
        _apply_postgresql_rules(engine)
        return engine
    except ArgumentError as error:
        raise SettingsError(f"NIGHTMILL_DATABASE_URL: {settings.scrubbed(error)}") from None
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"PostgreSQL needs the package {error.name!r}: pip install 'nightmill[postgres]'"
        ) from None


def _apply_postgresql_rules(engine: Engine) -> None:
    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: object, args: Any, options: dict[str, Any]) -> Any:
        given = float(options.get("connect_timeout", CONNECT_SECONDS))
        options["connect_timeout"] = math.ceil(seconds_for(given if given > 0.0 else CONNECT_SECONDS))
        return bounded_connection().connect_again(args, options)

    ping = engine.dialect.do_ping

    def bounded_ping(connection: Any) -> bool:
        with patience(PING_SECONDS):
            return ping(connection)

    engine.dialect.do_ping = bounded_ping  # type: ignore[method-assign,assignment]  # SQLAlchemy has no event for it


def _apply_sqlite_rules(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # pysqlite begins nothing by itself; on_begin does
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        busy = math.ceil(1000 * seconds_for(STATEMENT_SECONDS))
        if connection.info.get(_BUSY) != busy:  # as long as the caller has for its turn to write
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {busy}")
            connection.info[_BUSY] = busy
        read_only = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _load_json(text: str | bytes) -> Any:
    """A JSON column's value; text that is not JSON as it is, for the reader of that one row to refuse."""
    try:
        return json.loads(text)
    except ValueError:
        return text
