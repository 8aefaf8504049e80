"""The columns of a table, their kinds, and what of them comes back."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.csvfile import index_columns
from nightmill.jobs.formats.rows import InputRow, RowError, printable
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.tables.arrow_files import pyarrow
from nightmill.jobs.tables.kinds import TEXT, joined, kind_of
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.rows import RowMaker
from nightmill.jobs.tables.shape import TABLE, Shape, kept_names

ANSWERS = "answers"
"""The key of a table's settings for the columns that are answers of batches before."""
_MOST_COLUMNS = 10_000

Record = tuple[int, JsonObject | RowError]
"""A 1-based number, and the values of a row by column, or why it cannot be read."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table: kinds by name, and Arrow's schema if it has one."""

    kinds: Mapping[str, str]
    schema: Any = None
    index: frozenset[str] = field(default_factory=frozenset)
    """Columns that are the index of a pandas frame, and no part of the table."""
    answers: tuple[str, ...] = ()
    """Columns that are answers of the batches that the rows follow."""

    @classmethod
    def of_schema(cls, schema: Any, label: str) -> "Columns":
        """Read the columns of an Arrow schema. Raises BatchFileError for names that are there twice."""
        index = index_columns(schema.names)
        names = [name for name in schema.names if name not in index]
        check_names(names, label)
        return cls({one.name: str(one.type) for one in schema if one.name not in index}, schema, index)

    def beside(self, names: Collection[str]) -> "Columns":
        """These columns, and behind them texts of other names."""
        schema = self.schema
        if schema is not None:
            for name in names:
                schema = schema.append(pyarrow().field(name, pyarrow().string()))
        return replace(self, kinds={**self.kinds, **dict.fromkeys(names, TEXT)}, schema=schema)

    def shape(self, options: TableOptions) -> Shape:
        """Derive the columns of results. Raises InvalidParameterError for columns that are not there."""
        for template in (options.template, options.system):
            if template is not None:
                template.check(self.kinds, follows=options.after is not None)
        if not options.named:
            options.template.check_braces(self.kinds)
        schema = None
        if self.schema is not None:
            arrow = pyarrow()
            kept = [self.schema.field(name) for name in kept_names(options, self.kinds)]
            schema = arrow.schema([arrow.field(one.name, one.type) for one in kept]).serialize().to_pybytes()
        return Shape.of(options, self.kinds, schema)


class Table:
    """A source of rows that is a table: the columns that come back, and its settings."""

    def __init__(self, columns: Columns, options: TableOptions) -> None:
        self.options = options
        self.columns = columns
        self.shape = columns.shape(options)

    @property
    def wanted(self) -> list[str]:
        """The columns that are read: those that the templates name, and those that are kept."""
        names = {*self.options.named, *(name for name, _ in self.shape.kept)}
        return [name for name in self.columns.kinds if name in names]

    def settings(self) -> JsonObject:
        """The settings of the batch that describe the table."""
        options = self.options
        said: JsonObject = {"template": options.template.text, "empty": str(options.empty)}
        if options.system is not None:
            said["system"] = options.system.text
        if options.plain:
            said["plain"] = True
        if options.after is not None:
            said |= {"after": options.after, ANSWERS: list(self.columns.answers)}
        return {TABLE: said | self.shape.values()}

    def rows(self, records: Iterable[Record], defaults: JobSpec) -> Iterator[InputRow]:
        """The rows of a batch, without those that are left out."""
        maker = RowMaker(self.options, tuple(name for name, _ in self.shape.kept), defaults)
        for number, record in records:
            if (row := maker.row(number, record)) is not None:
                yield row


def check_names(names: Sequence[str], label: str) -> None:
    """Refuse columns without a name, and names that are there twice. Raises BatchFileError."""
    seen = set[str]()
    if len(names) > _MOST_COLUMNS:
        raise BatchFileError(f"{label}: has more than {_MOST_COLUMNS:,} columns; divide it")
    for number, name in enumerate(names, 1):
        if not name:
            raise BatchFileError(f"{label}: column {number} has no name; give it one")
        if name in seen:
            raise BatchFileError(f"{label}: column {printable(name)!r} is there twice; rename one")
        seen.add(name)
    if not names:
        raise BatchFileError(f"{label}: has no columns; begin it with a row of their names")


def kinds_of(records: Iterable[JsonObject | RowError], label: str) -> dict[str, str]:
    """The columns of rows of JSON, in the order in which they come, and the kinds that hold their values."""
    kinds: dict[str, str | None] = {}
    for record in records:
        if isinstance(record, RowError):
            continue
        for name, value in record.items():
            found = kind_of(value)
            if name not in kinds and len(kinds) >= _MOST_COLUMNS:
                raise BatchFileError(f"{label}: has more than {_MOST_COLUMNS:,} different keys; divide it")
            kinds[name] = joined(kinds.get(name), found)
    return {name: kind or TEXT for name, kind in kinds.items()}
