"""Answers as a table: the columns that were kept, in their types, and ours behind them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.layout import Layout, WholeWriter, csv_line
from nightmill.jobs.formats.results import READ, answer_values, error_of, reply_values
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.reply.embeddings import written
from nightmill.jobs.reply.job import Job
from nightmill.jobs.tables.kinds import cell, flat
from nightmill.jobs.tables.shape import ID, Shape
from nightmill.jobs.tables.spreading import spread_values

_USUAL = Dialect()
_FORMATS = {
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.CSV,
    ".jsonl": FileFormat.JSONL,
    ".ndjson": FileFormat.JSONL,
    ".json": FileFormat.JSONL,
    ".parquet": FileFormat.PARQUET,
    ".pq": FileFormat.PARQUET,
    ".arrow": FileFormat.ARROW,
    ".feather": FileFormat.ARROW,
    ".ipc": FileFormat.ARROW,
}


class TableLayout(Layout):
    """Rows of results or errors of a table. Values of JSON lines are as they were, those of others flat."""

    def __init__(
        self, format: FileFormat, shape: Shape, errors: bool = False, dialect: Dialect = _USUAL
    ) -> None:
        super().__init__(format, errors, dialect)
        self.shape = shape
        self.ours = shape.ours(errors=errors)
        self.columns = dict(shape.kept) | {one.name: one.kind for one in self.ours}
        self.added = () if errors else shape.added()
        self.id_column = next(one.name for one in self.ours if one.key == ID)

    def row(self, job: Job) -> JsonObject:
        """A job that has ended as a row."""
        kept = {name: job.metadata.get(name) for name, _ in self.shape.kept}
        values = self._values(job)
        return kept | {one.name: values.get(one.key) for one in self.ours}

    def writer(self, path: Path, label: str) -> WholeWriter:
        """Make the writer of a Parquet or Arrow file."""
        from nightmill.jobs.tables.arrow_files import ArrowFileWriter

        return ArrowFileWriter(path, self, label)

    def read_ids(self, path: Path) -> Iterator[str] | None:
        """The job ids of a Parquet or Arrow file; None if its columns are others."""
        from nightmill.jobs.tables.arrow_files import read_ids

        return read_ids(path, self)

    def line(self, row: JsonObject) -> bytes:
        """A row of CSV or JSON lines."""
        if self.format is FileFormat.CSV:
            return csv_line((cell(row.get(name)) for name in self.columns), self.dialect)
        return super().line(row)

    def owns(self, row: JsonObject) -> bool:
        """True if an object is a row of this table."""
        known = any(row.keys() == columns.keys() for columns in self.known_columns())
        return known and isinstance(row.get(self.id_column), str)

    def flat(self, rows: list[JsonObject], name: str) -> list[Any]:
        """A column of rows, as its kind has it."""
        kind = self.columns[name]
        return [flat(row.get(name), kind) for row in rows]

    def _values(self, job: Job) -> JsonObject:
        """Our values of a job, by their keys."""
        read = reply_values(job.replies[0]) if job.answers else {}
        calls = read.get(READ[2]) or None
        made: JsonObject = {
            "id": job.id,
            "answer": job.content if job.answers else job.text,
            "reasoning": read.get("reasoning"),
            "answers": answer_values(job) or None,
            "tool_calls": calls,
        }
        if self.errors:
            return made | {"line": job.row} | error_of(job)
        if job.packed_embedding is not None:
            made |= {"embedding": written(job.packed_embedding), "relevance": job.relevance}
        parsed = job.parsed if self.shape.spread else None
        spread = spread_values(parsed, self.shape.spread)
        return (
            made
            | {f"spread.{name}": value for name, value in spread.items()}
            | {
                "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
                "prompt_tokens": job.prompt_tokens,
                "completion_tokens": job.completion_tokens,
                "seed": job.seed,
                "cached_tokens": job.cached_tokens,
                "reasoning_tokens": job.reasoning_tokens,
            }
        )


def layout_of(
    shape: Shape | None,
    format: FileFormat,
    path: str | Path | None = None,
    *,
    errors: bool = False,
    dialect: Dialect = _USUAL,
) -> "TableLayout | None":
    """The layout of a table's rows in a file of this name: by its ending, or in the format of the batch.

    dialect  of the input's CSV, as which that of the results is written

    None for a batch that was not a table.
    """
    if shape is None:
        return None
    suffix = "" if path is None else Path(path).suffix.lower()
    return TableLayout(_FORMATS.get(suffix, format), shape, errors, dialect.named(path))


def layout_in_database(shape: Shape | None, *, errors: bool = False) -> Layout:
    """Return the layout of rows in a table of a database, whether or not the batch was a table."""
    format = FileFormat.PARQUET
    return layout_of(shape, format, Path("rows.parquet"), errors=errors) or Layout(format, errors)


def shown(job: Job, shape: Shape, *, errors: bool) -> str:
    """A row as a line of JSON."""
    return json.dumps(TableLayout(FileFormat.JSONL, shape, errors).row(job), ensure_ascii=False)
