"""The columns of a table of answers: those that were kept, then ours. It is part of a batch's settings."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.formats.dialect import CSV
from nightmill.jobs.formats.rows import FLOATS
from nightmill.jobs.request.template import listed
from nightmill.jobs.tables.kinds import JSON, NUMBER, TEXT, WHOLE
from nightmill.jobs.tables.options import ALL, NONE, TableOptions

TABLE = "table"
"""The key of a batch's settings."""
SCHEMA = "schema"
"""The key below `TABLE` of the Arrow schema: it says no more than `columns`, with all its bits, and is
not part of a batch's identity."""
PREFIX = "nightmill_"
"""The prefix of a column of ours if its name is taken."""
ID = "id"
_RESULTS = {"stop_reason": TEXT}
_ERRORS = {"code": TEXT, "field": TEXT, "message": TEXT, "line": WHOLE}
_COUNTS = {"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "seed": WHOLE}
_ADDED = ("cached_tokens", "reasoning_tokens")  # which earlier versions lacked


@dataclass(frozen=True)
class Ours:
    """A column of ours: `key` is what it holds, `name` what it is called."""

    key: str
    name: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The columns of a table's results.

    kept    (name, kind or Arrow's type) of the columns that come back, in their order
    schema  their Arrow schema, as Arrow writes it, in base64; None if their kinds say all
    """

    kept: tuple[tuple[str, str], ...]
    schema: str | None
    column: str
    spread: tuple[tuple[str, str], ...]
    several: bool
    tools: bool
    embeds: bool = False
    ranks: bool = False

    @classmethod
    def of(cls, options: TableOptions, columns: Mapping[str, str], schema: bytes | None) -> Self:
        """For a table of these columns. Raises InvalidParameterError for names that clash or lack.

        schema  Arrow's of the columns that are kept
        """
        names = kept_names(options, columns)
        if options.column in names:
            raise InvalidParameterError(
                f"column: {options.column!r} is a column of the table already; give answers another name "
                "(--column), or keep the columns without it (--keep)",
                field="column",
            )
        return cls(
            kept=tuple((name, columns[name]) for name in names),
            schema=None if schema is None else base64.b64encode(schema).decode(),
            column=options.column,
            spread=options.spread,
            several=options.rows.several,
            tools=options.rows.tools,
            embeds=options.rows.embeds,
            ranks=options.rows.ranks,
        )

    @classmethod
    def read(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """Read the shape from a batch's settings; None for a batch that was not a table."""
        values = (settings or {}).get(TABLE)
        if not isinstance(values, Mapping):
            return None
        return cls(
            kept=_pairs(values["columns"]),
            schema=values.get(SCHEMA),
            column=str(values["column"]),
            spread=_pairs(values.get("spread", ())),
            several=bool(values.get("several")),
            tools=bool(values.get("tools")),
            embeds=bool(values.get("embeds")),
            ranks=bool(values.get("ranks")),
        )

    def values(self) -> JsonObject:
        """The shape as settings of a batch, for `read`."""
        said: JsonObject = {"column": self.column, "columns": [list(pair) for pair in self.kept]}
        if self.schema is not None:
            said[SCHEMA] = self.schema
        if self.spread:
            said["spread"] = [list(pair) for pair in self.spread]
        return said | {name: True for name in ("several", "tools", "embeds", "ranks") if getattr(self, name)}

    def ours(self, *, errors: bool) -> tuple[Ours, ...]:
        """Our columns, in order; none has the name of a kept one or of another."""
        taken = {name for name, _ in self.kept}
        made = []
        for key, wanted, kind in self._wanted(errors):
            name = wanted
            while name in taken:
                name = f"{PREFIX}{name}"
            taken.add(name)
            made.append(Ours(key, name, kind))
        return tuple(made)

    def added(self) -> tuple[str, ...]:
        """Names of our columns of results that files of earlier versions lack."""
        return tuple(one.name for one in self.ours(errors=False) if one.key in _ADDED)

    def _wanted(self, errors: bool) -> Iterator[tuple[str, str, str]]:
        """(key, name, kind); the answer's column comes first, where it can have its name."""
        if self.embeds or self.ranks:
            made = ("embedding", self.column, FLOATS) if self.embeds else ("relevance", self.column, NUMBER)
            yield from () if errors else (made,)
            for name, kind in (_ERRORS if errors else {"prompt_tokens": WHOLE}).items():
                yield name, name, kind
            yield ID, "job_id", TEXT
            return
        yield "answer", self.column, TEXT
        if not errors:
            taken = {name for name, _ in self.kept} | {self.column}
            for name, kind in self.spread:
                yield f"spread.{name}", f"{self.column}_{name}" if name in taken else name, kind
        for name, kind in (_ERRORS if errors else _RESULTS).items():
            yield name, name, kind
        yield "reasoning", "reasoning", TEXT
        if self.several:
            yield "answers", "answers", JSON
        if self.tools:
            yield "tool_calls", "tool_calls", JSON
        for name, kind in ({} if errors else _COUNTS).items():
            yield name, name, kind
        yield ID, "job_id", TEXT
        for name in () if errors else _ADDED:
            yield name, name, WHOLE


def kept_names(options: TableOptions, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that come back, in the table's order. Raises InvalidParameterError for one that lacks."""
    if options.keep in (ALL, NONE):
        return tuple(columns) if options.keep == ALL else ()
    for name in options.keep:
        if name not in columns:
            raise InvalidParameterError(
                f"keep: there is no column {name[:100]!r}; {listed(columns)}", field="keep"
            )
    return tuple(name for name in columns if name in options.keep)


def identity(settings: Mapping[str, Any] | None) -> JsonObject | None:
    """Settings without what may differ between two versions of pyarrow, and how their CSV is written."""
    if settings is None:
        return None
    settings = {name: value for name, value in settings.items() if name != CSV}
    if not isinstance(settings.get(TABLE), Mapping):
        return settings
    table = {name: value for name, value in settings[TABLE].items() if name != SCHEMA}
    return {**settings, TABLE: table}


def _pairs(values: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(kind)) for name, kind in values)
