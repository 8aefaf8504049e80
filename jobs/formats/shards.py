"""A folder of Parquet files as a target: results in parts, as tools for large tables read them.

The rows are written into one file first, under the rules for any file; at its end that is divided. An
existing folder of such parts is read into that file before, so that the same rules apply to what it holds.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.output import writing
from nightmill.jobs.formats.parquet import arrow_errors, pyarrow_parquet

ROWS_OF_A_PART = 100_000
_AT_ONCE = 4096  # rows in memory
_PART = re.compile(r"part-\d{5}\.parquet")


def is_folder(name: str) -> bool:
    """Return True if a name asks for a folder: it ends in a slash."""
    return name.endswith("/")


class IntoFolder:
    """A folder that gets its files at the end, all at once. `path` is the file to be written meanwhile.

    Raises BatchFileError for a folder that holds anything but parts of results.
    """

    def __init__(self, name: str, spool: Path) -> None:
        self.label = name
        self.path = spool / "rows.parquet"
        self._folder = Path(name).resolve()  # `./` has no name of its own
        self._old = self._folder.with_name(f".{self._folder.name}.old")
        self._arrow, self._parquet = pyarrow_parquet()
        with writing(self.label):
            if self._old.is_dir() and not self._folder.exists():
                self._old.rename(self._folder)  # a process was killed between the two renames of `deliver`
            if self._folder.exists() and not self._folder.is_dir():
                raise BatchFileError(f"{self.label}: is a file; name another folder")
            there = sorted(self._folder.iterdir()) if self._folder.exists() else []
        self._refuse_foreign(there)
        if there:
            with arrow_errors(self._arrow, self.label), self._writer(self.path, there[0]) as writer:
                for batch in _batches(self._parquet, there):
                    writer.write_batch(batch)

    def deliver(self) -> None:
        """Divide what was written, and put the parts in the place of those that were there."""
        if not self.path.exists():
            return
        new = self._folder.with_name(f".{self._folder.name}.partial")
        old = self._old
        with writing(self.label), arrow_errors(self._arrow, self.label):
            for left in (new, old):  # by a process that was killed
                if left.exists():
                    self._refuse_foreign(left.iterdir())
                    shutil.rmtree(left)
            new.mkdir(parents=True)
            try:
                self._divide(new)
            except BaseException:  # Ctrl-C, too, leaves no half folder behind; it is raised again
                shutil.rmtree(new, ignore_errors=True)
                raise
            with suppress(FileNotFoundError):
                self._folder.rename(old)
            new.rename(self._folder)
            shutil.rmtree(old, ignore_errors=True)

    def _refuse_foreign(self, files: Iterable[Path]) -> None:
        """Raise BatchFileError if there is a file that is not a part of results: it is somebody's."""
        for file in files:
            if not _PART.fullmatch(file.name):
                where = "" if file.parent == self._folder else f"{file.parent.name} beside it "
                raise BatchFileError(
                    f"{self.label}: {where}holds {file.name!r}, which is not of results; name another folder"
                )

    def _divide(self, folder: Path) -> None:
        batches = _batches(self._parquet, [self.path])
        number, batch = 0, next(batches, None)
        while batch is not None or number == 0:
            with self._writer(folder / f"part-{number:05d}.parquet", self.path) as writer:
                rows = 0
                while batch is not None and rows + len(batch) <= ROWS_OF_A_PART:
                    writer.write_batch(batch)
                    rows, batch = rows + len(batch), next(batches, None)
            number += 1

    @contextmanager
    def _writer(self, path: Path, like: Path) -> Iterator[Any]:
        with self._parquet.ParquetFile(like) as file:
            schema = file.schema_arrow
        with self._parquet.ParquetWriter(path, schema) as writer:
            yield writer


def _batches(parquet: Any, paths: list[Path]) -> Iterator[Any]:
    for path in paths:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=min(_AT_ONCE, ROWS_OF_A_PART))
