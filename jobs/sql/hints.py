"""Which index SQLite takes for a query.

It has no statistics, and for a row that lacks a value it expects many: so it prefers an index over batch and
state, by which it reads all rows of a batch, to one that leads to the few that are wanted. PostgreSQL plans
by what it has counted, and is left alone.
"""

from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler

__all__ = ["HintingCompiler", "by_index"]

Query = TypeVar("Query", bound=Select[Any])


class HintingCompiler(SQLiteCompiler):
    """Writes the hints of a query behind its tables, as SQLite's grammar has them."""

    def get_from_hint_text(self, table: Any, text: str | None) -> str | None:
        """Return the hint as it stands."""
        return text


def by_index(query: Query, table: Any, index: str) -> Query:
    """Have SQLite read `table` by this index; it refuses the query if the index cannot serve it."""
    return query.with_hint(table, f"INDEXED BY {index}", "sqlite")
