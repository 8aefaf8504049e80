"""Copying of a stream to a local file, with a limit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.errors import BatchFileError

PIECE = 1 << 20


def copy(source: BinaryIO, path: Path, label: str, most: int) -> int:
    """Copy a stream to a new file; returns its size in bytes. Errors from reading pass through to the caller.

    Raises BatchFileError if the stream has more than `most` bytes, or the file cannot be written.
    """
    copied = 0
    with _errors(label, path):
        file = path.open("xb")
    with file:
        while piece := source.read(PIECE):
            copied += len(piece)
            if copied > most:
                raise BatchFileError(
                    f"{label}: has more than {most:,} bytes; raise NIGHTMILL_SPOOL_BYTES, or name a file of "
                    "this disk"
                )
            with _errors(label, path):
                file.write(piece)
                file.flush()
    return copied


@contextmanager
def _errors(label: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BatchFileError(
            f"{label}: cannot be copied to {path.parent} (TMPDIR): {error.strerror or error}"
        ) from error
