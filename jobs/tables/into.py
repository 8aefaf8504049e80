"""Results into a table of the user's: one transaction for each group of rows, idempotent by the job's id."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.reply.job import Job
from nightmill.jobs.tables.databases import UsersDatabase
from nightmill.jobs.tables.kinds import BOOLEAN, NUMBER, WHOLE, kept_value

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

_GROUP = 1000  # rows in a transaction
_WHOLE = (WHOLE, "int8", "int16", "int32", "uint8", "uint16", "uint32")
_NUMBERS = (NUMBER, "float", "float64", "float32", "halffloat")


class UsersTable:
    """A table behind `URL#TABLE` or `URL#SCHEMA.TABLE`, which is made if it is not there.

    One that is there must have the columns of the layout, and no two rows with the same job. Raises
    BatchFileError.
    """

    def __init__(self, target: str) -> None:
        url, _, name = target.rpartition("#")
        self._schema, _, self._name = name.rpartition(".")
        if not url or not self._name:
            raise BatchFileError(
                f"--into: {name!r} is not a URL and a table; write it as postgresql://HOST/DATABASE#TABLE"
            )
        self._database = UsersDatabase(url)
        self.label = f"{self._database.label}#{name}"

    def check(self, layout: Layout) -> None:
        """Check, before hours of work, that the database answers and the table, if there, suits the rows.

        Raises BatchFileError.
        """
        with self._database.engine() as engine, engine.connect() as connection:
            self._check(connection, layout)

    def write(
        self, jobs: Iterable[Job], layout: Layout, *, on_rows: Callable[[int], None] | None = None
    ) -> int:
        """Insert a row for each of these jobs, or replace it; returns their number. Raises BatchFileError."""
        written = 0
        with self._database.engine() as engine:
            with engine.begin() as connection:
                table = self._table(connection, layout)
            statement = self._upsert(table, layout.id_column)
            for group in _groups(jobs):
                names = {column.name for column in table.columns}
                rows = [self._values(layout.row(job), layout, names) for job in group]
                with engine.begin() as connection:
                    connection.execute(statement, rows)
                written += len(rows)
                if on_rows is not None:
                    on_rows(written)
        return written

    def _table(self, connection: "Connection", layout: Layout) -> "Table":
        """Find the table, or make it."""
        from sqlalchemy import Column, MetaData, Table

        there = self._check(connection, layout)
        columns = [
            Column(name, _type(kind), primary_key=name == layout.id_column, quote=True)
            for name, kind in layout.columns.items()
        ]
        table = Table(self._name, MetaData(), *columns, schema=self._schema or None)
        if not there:
            table.create(connection)
        return table

    def _check(self, connection: "Connection", layout: Layout) -> bool:
        """Return True for a table that is there and suits the layout, from which its optional columns go."""
        from sqlalchemy import inspect

        schema, found = self._schema or None, inspect(connection)
        if not found.has_table(self._name, schema=schema):
            return False
        there = {column["name"] for column in found.get_columns(self._name, schema=schema)}
        if lacking := layout.narrow(there):
            raise BatchFileError(
                f"{self.label}: lacks the column {lacking[0]!r} of these results; add it, or name "
                "another table"
            )
        unique: list[Any] = [found.get_pk_constraint(self._name, schema=schema).get("constrained_columns")]
        unique += [one["column_names"] for one in found.get_unique_constraints(self._name, schema=schema)]
        unique += [
            one["column_names"] for one in found.get_indexes(self._name, schema=schema) if one["unique"]
        ]
        if [layout.id_column] not in unique:
            raise BatchFileError(
                f"{self.label}: may have a job twice; make {layout.id_column!r} its primary key, or unique"
            )
        return True

    def _upsert(self, table: "Table", key: str) -> Any:
        from sqlalchemy.dialects import postgresql, sqlite

        insert: Any = sqlite.insert if self._database.is_sqlite else postgresql.insert
        adding = insert(table)
        others = {column.name: adding.excluded[column.name] for column in table.columns if column.name != key}
        return adding.on_conflict_do_update(index_elements=[key], set_=others)

    @staticmethod
    def _values(row: Mapping[str, Any], layout: Layout, names: set[str]) -> dict[str, Any]:
        kinds = layout.columns.items()
        return {name: _value(row.get(name), kind) for name, kind in kinds if name in names}


def _groups(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    group: list[Job] = []
    for job in jobs:
        group.append(job)
        if len(group) == _GROUP:
            yield group
            group = []
    if group:
        yield group


def _type(kind: str) -> Any:
    """The column type for a kind, or a type of Arrow's; text holds what has none of its own."""
    from sqlalchemy import BigInteger, Boolean, Double, Text

    if kind in _WHOLE:
        return BigInteger()
    if kind in _NUMBERS:
        return Double()
    return Boolean() if kind == BOOLEAN else Text()


def _value(value: Any, kind: str) -> Any:
    if value is None or kind in _WHOLE or kind == BOOLEAN:
        return value
    if kind in _NUMBERS:
        return float(value)  # also of the names of what is not finite
    if isinstance(value, str):
        return value
    return json.dumps(kept_value(value), ensure_ascii=False)
