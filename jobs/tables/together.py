"""Several files as one table: those of a folder, or those that match a pattern."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nightmill.jobs.errors import BatchFileError, InvalidParameterError
from nightmill.jobs.formats.inputs import InputFile
from nightmill.jobs.formats.rows import FileFormat, printable
from nightmill.jobs.formats.together import FilesTogether, base_of, files_of, is_together, partitions_of
from nightmill.jobs.tables.columns import Columns, Table
from nightmill.jobs.tables.kinds import TEXT, joined
from nightmill.jobs.tables.memory import TableItems
from nightmill.jobs.tables.options import TableOptions
from nightmill.jobs.tables.reading import TableFile

_AT_ONCE = min(8, os.cpu_count() or 1)


class TableFiles(FilesTogether, TableFile):
    """A table of several files, which have the same columns.

    Raises BatchFileError for a file with other columns, and what `TableFile` raises.
    """

    def __init__(
        self, path: str | Path, parts: Sequence[TableFile], options: TableOptions, label: str | None = None
    ) -> None:
        FilesTogether.__init__(self, path, parts, label)
        first = parts[0]
        kinds: dict[str, str] = dict(first.table.columns.kinds)
        for part in parts[1:]:
            other = part.table.columns.kinds
            if self.format is FileFormat.JSONL:  # rows may lack keys, and so may files
                for name, kind in other.items():
                    kinds[name] = joined(kinds.get(name), kind) or TEXT
            elif dict(other) != kinds:
                raise BatchFileError(
                    f"{self.label}: {part.label} has other columns than {first.label} "
                    f"({_difference(kinds, other)}); divide them"
                )
        columns = first.table.columns
        self.table = Table(Columns(kinds, columns.schema, columns.index), options)


def open_table(
    path: str | Path,
    format: FileFormat | None = None,
    *,
    options: TableOptions,
    label: str | None = None,
) -> TableFile:
    """Open a file, a folder of files or a pattern as a table. Raises what `TableFile` raises."""
    if not is_together(path):
        return TableFile(path, format, options=options, label=label)
    files = files_of(path, label)

    def opened(one: Path, partition: dict[str, str | None]) -> TableFile:
        return TableFile(one, format, options=options, partition=partition)

    with ThreadPoolExecutor(_AT_ONCE) as threads:  # which wait for processes that read Parquet
        parts = list(threads.map(opened, files, partitions_of(files, base_of(Path(path)))))
    return TableFiles(path, parts, options, label)


def paths_of(source: InputFile) -> dict[str, Path]:
    """Return the files of an input, which no output may be, by their descriptions."""
    if isinstance(source, FilesTogether):
        return {f"the input {part.label}": part.path for part in source.parts}
    return {"the input": source.path}


def _difference(kinds: dict[str, str], other: object) -> str:
    others = dict(other)  # type: ignore[call-overload]
    name = next(name for name in {**kinds, **others} if kinds.get(name) != others.get(name))
    said = f"{printable(name)!r} is {others.get(name, 'not there')}"
    return f"{said}, and was {kinds.get(name, 'not there')}"


TableSource = TableFile | TableItems


def table_source(source: Any, options: TableOptions) -> TableSource:
    """A source of a batch as a table, unless it is one."""
    if isinstance(source, TableFile | TableItems):
        return source
    if isinstance(source, InputFile):
        raise InvalidParameterError("template: is for a path or a table; give the path", field="template")
    return (
        open_table(source, options=options) if isinstance(source, str | Path) else TableItems(source, options)
    )
