"""The rows of an SQL query as an input: read once, through a server-side cursor, into a file of this disk.

A file is read several times, and its fingerprint says whether a batch is the same: so are the rows of a query
that are the same, in the same order.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nightmill.jobs.errors import BatchFileError, EmptyBatchFileError
from nightmill.jobs.formats.inputs import InputFile
from nightmill.jobs.formats.places import Opened, spool
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.tables.databases import UsersDatabase
from nightmill.jobs.tables.memory import json_value, plain_value

_ROWS_AT_ONCE = 1000


@contextmanager
def queried(query: str, url: str, *, most: int, opened: Opened) -> Iterator[InputFile]:
    """Provide the rows of a query as an input.

    query   one statement that returns rows; it runs in a transaction that may only read
    url     of the database, PostgreSQL or SQLite
    most    size limit of the rows in bytes
    opened  makes an input of a path, a format and a label

    Raises BatchFileError.
    """
    database = UsersDatabase(url)
    label = f"{database.label}: query"
    with spool() as folder:
        path = folder / "query.jsonl"
        left = most
        with path.open("wb") as file:
            for row in rows_of(query, database):
                line = json.dumps(row, ensure_ascii=True, default=_plain).encode() + b"\n"
                left -= len(line)
                if left < 0:
                    raise BatchFileError(
                        f"{label}: has rows of more than {most:,} bytes; raise NIGHTMILL_SPOOL_BYTES"
                    )
                file.write(line)
        if left == most:
            raise EmptyBatchFileError(f"{label}: gives no rows")
        yield opened(path, FileFormat.JSONL, label=label)


def rows_of(query: str, database: UsersDatabase) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query by column, a group at a time. Raises BatchFileError."""
    with database.engine() as engine, engine.connect() as connection:
        if database.is_sqlite:
            connection.exec_driver_sql("PRAGMA query_only = ON")
        else:
            connection = connection.execution_options(postgresql_readonly=True)
        # Percent signs and colons are the query's own.
        options = {"stream_results": True, "yield_per": _ROWS_AT_ONCE, "no_parameters": True}
        result = connection.exec_driver_sql(query, execution_options=options)
        if not result.returns_rows:
            raise BatchFileError(f"{database.label}: the query returns no rows; begin it with SELECT")
        names = list(result.keys())
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BatchFileError(f"{database.label}: column {twice!r} is there twice; rename one with AS")
        for row in result:
            yield {name: json_value(value) for name, value in zip(names, row, strict=True)}


def _plain(value: Any) -> Any:
    """Convert a value of a database that JSON does not have; bytes become base64, as those of tables."""
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode()
    try:
        return plain_value(value)
    except TypeError:
        return str(value)  # such as UUIDs, ranges and addresses
