"""Processes that read files of an input, started before the files' turn."""

import os
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol

from nightmill.jobs.errors import NightmillError
from nightmill.jobs.formats.parquet_reader import ParquetReader

AHEAD: Final = max(1, min(4, os.cpu_count() or 1))
"""Files whose processes are started before their turn. One that nobody reads yet waits with 2,048 rows."""


class ReadByProcess(Protocol):
    """A file that a process may read."""

    def reader_of_rows(self) -> ParquetReader | None:
        """Start the process that reads its rows; None if no process does."""
        ...


def readers_ahead(
    parts: Iterable[ReadByProcess], most: int = AHEAD
) -> Generator[ParquetReader | None, None, None]:
    """Yield the process that reads the rows of each file, while those of the next `most` files are started.

    None stands for a process that is to be started in the file's turn: there is none, or it could not be
    started ahead, for example since the file is gone, which is an error behind the rows of those before it.
    A process ends with its file's turn, and all of them where the iterator is closed.
    """
    coming = iter(parts)
    begun: deque[ParquetReader | None] = deque()
    reader: ParquetReader | None = None
    try:
        begun.extend(map(_started, islice(coming, 1 + most)))
        while begun:
            reader = begun.popleft()
            yield reader
            if reader is not None:
                reader.close()
            begun.extend(map(_started, islice(coming, 1)))
    finally:
        for left in (reader, *begun):
            if left is not None:
                left.close()


def _started(part: ReadByProcess) -> ParquetReader | None:
    with suppress(NightmillError):
        return part.reader_of_rows()
    return None
