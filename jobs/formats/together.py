"""Several files as one input: those of a folder, or those that match a pattern, in the order of their names.

All have one format. Rows are numbered through, and the fingerprint is of all names and contents.
"""

import fnmatch
import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError
from nightmill.jobs.formats.ahead import readers_ahead
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.inputs import ENDINGS, InputFile, Record
from nightmill.jobs.formats.parquet_reader import ParquetReader
from nightmill.jobs.formats.rows import FileFormat

_MAGIC = "*?["
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_MOST_FILES = 10_000


class FilesTogether(InputFile):
    """An input of several files, each opened already. `path` is their folder or pattern.

    Raises BatchFileError for files of different formats.
    """

    def __init__(self, path: str | Path, parts: Sequence[InputFile], label: str | None = None) -> None:
        self.path = Path(path)
        self.label = str(path) if label is None else label
        self.parts = parts
        self.format = parts[0].format
        self._name = self.path.name
        self._position = 0
        self._stream = self._fingerprint = None
        self._read: list[InputFile] = []
        for part in parts:
            if part.format is not self.format:
                raise BatchFileError(
                    f"{self.label}: {part.label} is {part.format}, and {parts[0].label} is {self.format}; "
                    "divide them into folders of one format"
                )

    @property
    def files(self) -> list[Path]:
        """The paths of its files."""
        return [part.path for part in self.parts]

    @property
    def dialect(self) -> Dialect:
        """The dialect of the first file."""
        return self.parts[0].dialect

    def takes(self, path: Path) -> bool:
        """Return True if a file of this path would be one of its files."""
        if not self.path.is_dir():
            return fnmatch.fnmatch(os.path.realpath(path), os.path.realpath(self.path))
        inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path))
        return inside and is_input(path)

    def hashing(self) -> Generator[None, None, str]:
        """Compute the fingerprint in small steps; yields between steps."""
        digest = hashlib.sha256()
        for part in self.parts:
            of_part = yield from part.hashing()
            name = os.path.relpath(part.path, base_of(self.path))
            digest.update(f"{name}\0{of_part}\n".encode("utf-8", "surrogateescape"))
        self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def changed(self, fingerprint: str | None = None) -> bool:
        """Return True if a file changed since the fingerprint was taken, has come or has gone; with
        `fingerprint` the contents are compared, too."""
        if self.immutable:
            return False
        if self.files != files_of(self.path, self.label):
            return True
        taken = [part.taken if fingerprint is not None else None for part in self.parts]
        return any(part.changed(print) for part, print in zip(self.parts, taken, strict=True)) or (
            fingerprint not in (None, self._fingerprint)
        )

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(part.size for part in self.parts)

    @property
    def position(self) -> int:
        """The number of these bytes that the latest `rows` has read."""
        return sum(part.position if part is self._read[-1] else part.size for part in self._read)

    def _records(self, reader: ParquetReader | None = None) -> Iterator[Record]:
        self._read = []
        last = 0
        with closing(readers_ahead(self.parts)) as readers:
            for part, of_part in zip(self.parts, readers, strict=False):
                self._read.append(part)
                before = last
                for number, record in part._records(of_part):
                    last = before + number
                    yield last, record


def has_magic(name: str) -> bool:
    """Return True if a name is a pattern."""
    return any(mark in name for mark in _MAGIC)


def base_of(path: Path) -> Path:
    """Return the folder in which a pattern begins, or the folder itself."""
    while has_magic(str(path)) and not path.is_dir():
        path = path.parent
    return path


def partitions_of(files: Sequence[Path], base: Path) -> list[dict[str, str | None]]:
    """Return what the folders of each file say of all its rows, as Hive and Spark name them: `KEY=VALUE`.

    Nothing if the folders of some have other keys. `base` is the folder of all files.
    """
    named = [
        [folder.split("=", 1) for folder in file.relative_to(base).parts[:-1] if "=" in folder]
        for file in files
    ]
    keys = {tuple(key for key, _ in folders) for folders in named}
    if len(keys) > 1 or "" in keys.pop():
        return [{} for _ in files]
    return [
        {unquote(key): None if value == _NO_VALUE else unquote(value) for key, value in folders}
        for folders in named
    ]


def is_together(path: str | Path) -> bool:
    """Return True if the name is a folder's, or a pattern and no file's."""
    return Path(path).is_dir() or (has_magic(str(path)) and not Path(path).exists())


def files_of(path: str | Path, label: str | None = None) -> list[Path]:
    """Return the files of a folder (also those of folders below it), or those that match a pattern.

    Hidden files, those whose names begin with `_`, and in folders those with other endings than inputs have,
    are left out. Raises BatchFileError if there is none, or too many.
    """
    said = str(path) if label is None else label
    whole = Path(path)
    base = base_of(whole)
    try:
        found = [
            one
            for one in (base.rglob("*") if base == whole else base.glob(str(whole.relative_to(base))))
            if one.is_file() and not _is_hidden(one.relative_to(base)) and (base != whole or is_input(one))
        ]
    except OSError as error:
        raise BatchFileUnavailableError(f"{said}: cannot be read: {error.strerror or error}") from error
    if not found:
        known = ", ".join(ENDINGS)
        raise BatchFileUnavailableError(f"{said}: no input files found; their names must end in {known}")
    if len(found) > _MOST_FILES:
        raise BatchFileError(f"{said}: has more than {_MOST_FILES:,} files; divide it")
    return sorted(found)


def open_input(path: str | Path, format: FileFormat | None = None, *, label: str | None = None) -> InputFile:
    """Open a file, a folder of files or a pattern as an input. Raises BatchFileError."""
    if not is_together(path):
        return InputFile(path, format, label=label)
    return FilesTogether(path, [InputFile(one, format) for one in files_of(path, label)], label)


def is_input(path: Path) -> bool:
    """Return True if a name ends as those of inputs do."""
    return path.name.lower().removesuffix(".gz").endswith(ENDINGS)


def _is_hidden(path: Path) -> bool:
    return any(name.startswith((".", "_")) for name in path.parts)
