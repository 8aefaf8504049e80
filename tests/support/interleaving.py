"""Chosen interleavings of transactions: stop one before a statement, see that another waits for a lock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event, text

from nightmill.jobs.sql.database import Database
from tests.support.servers import wait_until


@contextmanager
def before(database: Database, statement: str, action: Callable[[], object], nth: int = 1) -> Iterator[None]:
    """Run `action` once, before the `nth` SQL with `statement` in it that `database` executes."""
    seen = 0

    def on_execute(connection: Any, cursor: Any, sql: str, *_: Any) -> None:
        nonlocal seen
        if statement in " ".join(sql.split()):
            seen += 1
            if seen == nth:
                action()

    event.listen(database.engine, "before_cursor_execute", on_execute)
    try:
        yield
    finally:
        event.remove(database.engine, "before_cursor_execute", on_execute)
    assert seen >= nth, f"{statement!r} was executed {seen} times"


def wait_until_one_is_blocked(database: Database) -> None:
    """Return when a transaction waits for another's lock. SQLite does not tell: then at once."""
    if database.is_sqlite:
        return
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_until(lambda: connection.execute(query).scalar_one(), what="a transaction that waits")
