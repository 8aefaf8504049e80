"""Where a file is that a user names: on this disk, `-` for standard input or output, or behind a URL.

A file is read several times (for its format, its fingerprint, its rows), and results grow and are put in
order. So what is elsewhere is a file of this disk meanwhile: in a folder of its own under TMPDIR, which is
gone at the end.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.inputs import InputFile
from nightmill.jobs.formats.rows import FileFormat

STANDARD = "-"
STDIN, STDOUT = "standard input", "standard output"
_ENDINGS = {FileFormat.CSV: ".csv", FileFormat.PARQUET: ".parquet"}
_GZIP = b"\x1f\x8b"
_PIECE = 1 << 20


class Place(Protocol):
    """A file to be written: at `path` on this disk, and for people called `label`."""

    path: Path
    label: str

    def deliver(self) -> None:
        """Bring what was written to where it was asked for. Raises BatchFileError."""
        ...


class OnThisDisk:
    """A file that is written where it stays."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.label = str(path)

    def deliver(self) -> None:
        """It is there."""


class _ToStandardOutput:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = STDOUT

    def deliver(self) -> None:
        try:
            with self.path.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer, _PIECE)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise BatchFileError(f"{STDOUT}: cannot be written: {error.strerror or error}") from error


@contextmanager
def taken_from(name: str, format: FileFormat | None = None, *, most: int) -> Iterator[InputFile]:
    """The input of this name, in `format` or in that which it is found to have.

    most  bytes that it may have if it is not on this disk

    Raises BatchFileError if it cannot be had.
    """
    if name != STANDARD:
        yield InputFile(name, format)
        return
    with spool() as folder:
        yield InputFile(_read_stdin(folder, format, most), format, label=STDIN)


@contextmanager
def brought_to(name: str | None, format: FileFormat) -> Iterator[Place]:
    """Where a file of results or errors goes; None: nowhere, it is gone at the end. Raises BatchFileError."""
    if name is not None and name != STANDARD:
        yield OnThisDisk(name)
        return
    with spool() as folder:
        path = folder / f"rows{_ENDINGS.get(format, '.jsonl')}"
        yield OnThisDisk(path) if name is None else _ToStandardOutput(path)


def errors_name(results: str) -> str | None:
    """Where errors go unless something else is said: beside results.jsonl to results.errors.jsonl."""
    if results == STANDARD:
        return None
    path = PurePosixPath(results)
    return results.removesuffix(path.name) + f"{path.stem}.errors{path.suffix}"


@contextmanager
def spool() -> Iterator[Path]:
    """A folder that nobody else can look into. Raises BatchFileError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="nightmill-", ignore_cleanup_errors=True)
    except OSError as error:
        raise BatchFileError(f"TMPDIR: no folder can be made there: {error.strerror or error}") from error
    with folder as path:
        yield Path(path)


def copy(source: BinaryIO, path: Path, label: str, most: int) -> int:
    """Copy a stream to a new file; returns how many bytes.

    Raises BatchFileError, also if these are more than `most`.
    """
    copied = 0
    try:
        with path.open("xb") as file:
            while piece := source.read(_PIECE):
                copied += len(piece)
                if copied > most:
                    raise BatchFileError(
                        f"{label}: has more than {most:,} bytes; raise NIGHTMILL_SPOOL_BYTES, or name a file "
                        "of this disk"
                    )
                file.write(piece)
    except OSError as error:
        raise BatchFileError(
            f"{label}: cannot be copied to {path.parent}: {error.strerror or error}"
        ) from error
    return copied


def _read_stdin(folder: Path, format: FileFormat | None, most: int) -> Path:
    if sys.stdin.isatty():
        raise BatchFileError(f"{STDIN}: is a terminal; pipe rows into the command, or name a file")
    path = folder / "rows"
    copy(sys.stdin.buffer, path, STDIN, most)
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    # The name begins that of the batch, and its ending says how it is read.
    named = folder / f"stdin{_ENDINGS.get(format, '') if format else ''}{'.gz' if packed else ''}"
    return path.rename(named)
