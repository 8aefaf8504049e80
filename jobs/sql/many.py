"""Insertion of many jobs with one statement.

Columns that are null in all rows are left out. On PostgreSQL the rows are one parameter, a JSON list: the
driver would send, and the server execute, a statement for each of them.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from typing import cast as typed

from sqlalchemy import JSON, Connection, Table, Text, bindparam, cast, column, func, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.types import TypeEngine

from nightmill.jobs.sql.json_columns import dump_json
from nightmill.jobs.sql.tables import JobRow
from nightmill.jobs.sql.types import StorableString, StorableText

__all__ = ["insert_jobs"]

JOBS = typed(Table, JobRow.__table__)
_CONFLICTS: Mapping[str, Mapping[str, Any]] = {
    "idempotency_key": {
        "index_elements": ["idempotency_key"],
        "index_where": JobRow.idempotency_key.is_not(None),
    },
    "row": {"index_elements": ["batch", "row"], "index_where": JobRow.row.is_not(None)},
}


def insert_jobs(
    connection: Connection, rows: Sequence[Mapping[str, Any]], *, unless_there: str | None = None
) -> None:
    """Insert rows, all with the same keys, in their order.

    unless_there  leave out those of which there is one by "idempotency_key", or by "row" in its batch
    """
    if not rows:
        return
    names = tuple(name for name in rows[0] if any(row[name] is not None for row in rows))
    given = [{name: row[name] for name in names} for row in rows]
    if connection.dialect.name == "sqlite":
        connection.execute(_with_parameters(unless_there), given)
        return
    for name in names:
        if isinstance(storing := JOBS.c[name].type, StorableText | StorableString):
            for row in given:
                row[name] = storing.process_bind_param(row[name], connection.dialect)
    connection.execute(_of_json(names, unless_there), {"rows": dump_json(given)})


@cache
def _with_parameters(unless_there: str | None) -> Any:
    statement = sqlite_insert(JOBS)
    return statement if unless_there is None else statement.on_conflict_do_nothing(**_CONFLICTS[unless_there])


@cache
def _of_json(names: tuple[str, ...], unless_there: str | None) -> Any:
    """Build the statement for these columns: there are few sets of them."""
    columns = [column(name, _plain(JOBS.c[name].type)) for name in names]
    rows = func.json_to_recordset(cast(bindparam("rows", type_=Text()), JSON())).table_valued(*columns)
    chosen = rows.render_derived(with_types=True)
    statement = postgresql_insert(JOBS).from_select(names, select(*(chosen.c[name] for name in names)))
    return statement if unless_there is None else statement.on_conflict_do_nothing(**_CONFLICTS[unless_there])


def _plain(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type as which the driver's text is read."""
    return Text() if isinstance(type_, StorableText | StorableString) else type_
