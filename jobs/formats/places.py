"""Files named by users: on this disk, `-` for standard input or output, or behind a URL.

A file is read several times (for its format, its fingerprint, its rows), and results grow and are sorted. So
other sources and targets have a local copy meanwhile, in a temporary folder under TMPDIR that is removed at
the end.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.copying import PIECE, copy
from nightmill.jobs.formats.inputs import STDIN, InputFile
from nightmill.jobs.formats.remote import RemoteFile, is_remote
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.formats.shards import IntoFolder, is_folder
from nightmill.jobs.formats.together import open_input

STANDARD = "-"
STDOUT = "standard output"
_ENDINGS = {FileFormat.CSV: ".csv", FileFormat.PARQUET: ".parquet", FileFormat.ARROW: ".arrow"}
_GZIP = b"\x1f\x8b"


class Opened(Protocol):
    """Makes an input."""

    def __call__(
        self, path: str | Path, format: FileFormat | None = None, *, label: str | None = None
    ) -> InputFile:
        """See InputFile."""
        ...


class OutputTarget(Protocol):
    """A target for an output file: written at the local `path`, called `label` for people."""

    path: Path
    label: str

    def deliver(self) -> None:
        """Bring the written file to its destination. Raises BatchFileError."""
        ...


class OnThisDisk:
    """A file that is written at its destination."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.label = str(path)

    def deliver(self) -> None:
        """Do nothing, as the file is there."""


class _ToStandardOutput:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = STDOUT

    def deliver(self) -> None:
        try:
            with self.path.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer, PIECE)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise BatchFileError(f"{STDOUT}: cannot be written: {error.strerror or error}") from error


class _BehindUrl:
    """A target behind a URL. An existing file is fetched first, so that the same rules apply as for local
    files."""

    def __init__(self, url: str, folder: Path, most: int) -> None:
        self._remote = RemoteFile(url)
        self._remote.check_writable()
        self.path = folder / self._remote.name
        self.label = self._remote.label
        self._there = self._remote.version()
        if self._there is not None:
            self._remote.fetch(self.path, most)

    def deliver(self) -> None:
        """Upload the file, unless somebody else has written there meanwhile."""
        if self._remote.version() != self._there:
            raise BatchFileError(
                f"{self.label}: was written by somebody else meanwhile, and is left as it is; nothing is "
                "lost: write the results elsewhere with `nightmill batch results`"
            )
        if self.path.exists():
            self._remote.put(self.path)


def check_apart(source: str, results: str, errors: str | None) -> None:
    """Refuse a name that is not local and given twice; local names are compared when they are opened.

    Raises BatchFileError.
    """
    if errors == results and (is_remote(results) or results == STANDARD):
        raise _twice(results, "the file of results", "errors")
    for name, what in ((results, "results"), (errors, "errors")):
        if name == source and is_remote(source):
            raise _twice(name, "the input", what)


def _twice(name: str, other: str, what: str) -> BatchFileError:
    shown = RemoteFile(name).label if is_remote(name) else name
    return BatchFileError(f"{shown}: is also {other}: name another file for the {what}")


@contextmanager
def taken_from(
    name: str, format: FileFormat | None = None, *, most: int, opened: Opened = open_input
) -> Iterator[InputFile]:
    """Provide the input of this name, in `format` or in its detected format.

    most    size limit in bytes, if it is not on this disk
    opened  makes an input of a path, a format and a label

    Raises BatchFileError if it is not available.
    """
    if name != STANDARD and not is_remote(name):
        yield opened(name, format)
        return
    with spool() as folder:
        if is_remote(name):
            remote = RemoteFile(name)
            if remote.is_several:
                yield opened(remote.fetch_all(folder, most), format, label=remote.label)
                return
            remote.fetch(folder / remote.name, most)
            yield opened(folder / remote.name, format, label=remote.label)
            return
        yield opened(_read_stdin(folder, format, most), format, label=STDIN)


@contextmanager
def brought_to(name: str | None, format: FileFormat, *, most: int) -> Iterator[OutputTarget]:
    """Provide a target for results or errors; None: a temporary file that is dropped at the end.

    most  size limit in bytes for an existing file behind a URL

    Raises BatchFileError.
    """
    if name is not None and name != STANDARD and not is_remote(name) and not is_folder(name):
        yield OnThisDisk(name)
        return
    with spool() as folder:
        if name is not None and is_folder(name):
            if is_remote(name):
                raise BatchFileError(f"{RemoteFile(name).label}: folders can only be written on this disk")
            yield IntoFolder(name, folder)
            return
        if name is not None and is_remote(name):
            yield _BehindUrl(name, folder, most)
            return
        path = folder / f"rows{_ENDINGS.get(format, '.jsonl')}"
        yield OnThisDisk(path) if name is None else _ToStandardOutput(path)


def errors_name(results: str) -> str | None:
    """Return the default name for errors, such as results.errors.jsonl for results.jsonl."""
    if results == STANDARD:
        return None
    if is_folder(results):
        return f"{results.rstrip('/')}.errors/"
    path = PurePosixPath(results)
    return results.removesuffix(path.name) + f"{path.stem}.errors{path.suffix}"


@contextmanager
def spool() -> Iterator[Path]:
    """Provide a private temporary folder. Raises BatchFileError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="nightmill-", ignore_cleanup_errors=True)
    except OSError as error:
        raise BatchFileError(f"TMPDIR: no folder can be made there: {error.strerror or error}") from error
    with folder as path:
        yield Path(path)


def _read_stdin(folder: Path, format: FileFormat | None, most: int) -> Path:
    if sys.stdin.isatty():
        raise BatchFileError(f"{STDIN}: is a terminal; pipe rows into the command, or name a file")
    path = folder / "rows"
    try:
        copy(sys.stdin.buffer, path, STDIN, most)
    except OSError as error:
        raise BatchFileError(f"{STDIN}: cannot be read: {error.strerror or error}") from error
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    # The batch's name begins with it, and its ending selects the format.
    named = folder / f"stdin{_ENDINGS.get(format, '') if format else ''}{'.gz' if packed else ''}"
    return path.rename(named)
