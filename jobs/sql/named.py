"""The condition that an id is among those of a parameter: one statement, however many they are.

An IN list has a parameter for each of its members, so that with each length the statement is another one: it
is written, split into its parts by the driver, and planned by the server, again and again. Here the ids are
one parameter: an array on PostgreSQL, a JSON list on SQLite.
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

__all__ = ["among"]


_IDS = re.compile("[0-9a-f]+(?:,[0-9a-f]+)*")


class _Array(UserDefinedType[Any]):
    """An array of texts, which the driver takes as a list, or as the text of one that needs no quotes."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_: Any) -> str:
        return "VARCHAR[]"


class _Ids(TypeDecorator[Sequence[str]]):
    """A list of ids as one parameter."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else _Array())

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        ids = list(value or ())
        if dialect.name == "sqlite":
            return to_json(ids).decode()
        # The driver looks for marks to be quoted in each text, which takes longer than the statement does.
        joined = ",".join(ids)
        plain = joined.count(",") == len(ids) - 1 and _IDS.fullmatch(joined)
        return f"{{{joined}}}" if plain else ids


class _Among(FunctionElement[bool]):
    """Two clauses: a column, and the parameter with the ids."""

    name = "among"
    type = Boolean()
    inherit_cache = True

    def self_group(self, against: Any = None) -> Any:
        """Stand as it is in a condition: compared with 1, as where booleans are numbers, it uses no index."""
        return self


@compiles(_Among)
def _as_array(element: _Among, compiler: SQLCompiler, **options: Any) -> str:
    column, ids = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY ({ids})"


@compiles(_Among, "sqlite")
def _as_json(element: _Among, compiler: SQLCompiler, **options: Any) -> str:
    column, ids = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({ids}))"  # noqa: S608  (both are the compiler's)


def among(column: Any, parameter: str) -> ColumnElement[bool]:
    """Return the condition that a column of ids is one of those in the parameter of this name."""
    return _Among(column, bindparam(parameter, type_=_Ids()))
