"""Control of the process that reads Parquet: starts it with limits, and reports its errors.

A Parquet file may expand to millions of times its size. For an untrusted file, the expansion is limited in
proportion to its size: memory, rows, bytes of rows, and processor time. For a trusted file, only the size of
a row is limited.
"""

import importlib.util
import json
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import BatchFileError, MissingExtraError, NightmillError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT

PROGRAM: Final = Path(__file__).with_name("parquet_process.py")
ENVIRONMENT: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
TOO_LONG, NOT_UTF8 = "too long", "not UTF-8"
"""Placeholders for rows that cannot be read."""
_FRAME: Final = struct.Struct("<cI")
_COLUMNS, _ROWS, _END, _FAULT, _EXHAUSTED = b"C", b"R", b"Z", b"F", b"X"
_LONGEST_FRAME: Final = LINE_LIMIT + (1 << 20)
_SILENT_SECONDS: Final = 120.0  # after which a silent process is given up
_DYING_SECONDS: Final = 5.0
_OTHER_TYPE = "\0type"
_MARK: Final = b'{"\\u0000type":'
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Expansion:
    """Limits on the expansion of a file.

    memory     bytes of address space beyond those of an idle process; 0: unlimited
    rows       rows of the file
    bytes      bytes of all rows together, as JSON
    row_bytes  bytes of one row, as JSON
    seconds    processor time; 0: unlimited
    """

    memory: int = 0
    rows: int = _NO_LIMIT
    bytes: int = _NO_LIMIT
    row_bytes: int = LINE_LIMIT
    seconds: int = 0

    @classmethod
    def of_stranger(cls, size: int) -> Self:
        """Make the limits for an untrusted file of this size in bytes.

        Compressed or repeated texts may take a thousandth of their length, and equal rows less than a byte
        each. The constants are for small files, where proportions mean little.
        """
        mebi = 1 << 20
        return cls(
            memory=min(80 * mebi + 8 * size, 512 * mebi),
            rows=100_000 + size,
            bytes=256 * mebi + 1000 * size,
            row_bytes=min(4 * mebi + 16 * size, LINE_LIMIT),
            seconds=60 + size // mebi,
        )


class ParquetReader:
    """A file read in a separate process. Every method may raise BatchFileError."""

    def __init__(
        self,
        path: Path,
        label: str,
        expansion: Expansion,
        program: Path = PROGRAM,
        wanted: Mapping[str, Any] | None = None,
        described: str = "Parquet",
    ) -> None:
        """Start the process.

        program    the script that it runs
        wanted     arguments of the script besides the limits
        described  the format, for messages

        Raises MissingExtraError without pyarrow, NightmillError if no process can start.
        """
        self._label = label
        self._described = described
        self._expansion = expansion
        found = importlib.util.find_spec("pyarrow")
        if found is None or found.origin is None:
            raise MissingExtraError(f"Parquet files need pyarrow: {pip_install('parquet')}")
        limits = json.dumps({**asdict(expansion), **(wanted or {})})
        command = [sys.executable, "-I", "-S", str(program), limits, str(Path(found.origin).parents[1])]
        try:
            file = path.open("rb")
        except OSError as error:
            raise BatchFileError(f"{label}: cannot be read: {error.strerror or error}") from error
        with file:
            self._size = os.fstat(file.fileno()).st_size
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:  # no memory, or too many processes: not the file's fault
                said = f"the process that reads Parquet cannot be started: {error.strerror or error}"
                raise NightmillError(said) from error
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def columns(self) -> tuple[list[str], int]:
        """Return the names of the columns, and the file's number of rows. Must be called first."""
        said = self.header()
        return list(said["columns"]), int(said["rows"])

    def header(self) -> Mapping[str, Any]:
        """Read the process's description of the file, which comes before its rows."""
        _, said = self._frame(_COLUMNS)
        return dict(said)

    def rows(self) -> Iterator[list[Mapping[str, Any] | str]]:
        """Yield groups of rows in order; TOO_LONG or NOT_UTF8 replaces one that cannot be read."""
        while True:
            kind, rows = self._frame(_ROWS, _END)
            if kind == _END:
                return
            if TOO_LONG in rows and self._expansion.row_bytes < LINE_LIMIT:
                raise self._too_much(f"has a row of more than {self._expansion.row_bytes:,} bytes")
            yield rows

    def close(self) -> None:
        """End the process in any state."""
        self._process.kill()
        # It hangs in the kernel, for example on an unreachable disk.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _frame(self, *expected: bytes) -> tuple[bytes, Any]:
        kind, length = _FRAME.unpack(self._bytes(_FRAME.size))
        if length > _LONGEST_FRAME:
            raise self._broken("the process that reads it is damaged")
        data = self._bytes(length)
        try:
            value = json.loads(data, object_hook=_read_other if _MARK in data else None)
        except ValueError as error:
            raise self._broken("the process that reads it is damaged") from error
        if kind == _EXHAUSTED:
            raise self._too_much(value or "needs more memory to be read")
        if kind == _FAULT:
            raise self._broken(str(value))
        if kind not in expected:
            raise self._broken("the process that reads it is damaged")
        return kind, value

    def _bytes(self, count: int) -> bytearray:
        """Read this many bytes from the process."""
        found = bytearray()
        while len(found) < count:
            if not select.select([self._pipe], [], [], _SILENT_SECONDS)[0]:
                raise self._broken(f"the process that reads it gave no answer for {_SILENT_SECONDS:.0f} s")
            piece = os.read(self._pipe, min(count - len(found), 1 << 20))
            if not piece:
                raise self._lost()
            found += piece
        return found

    def _lost(self) -> BatchFileError:
        try:
            code = self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return self._broken("the process that reads it hung up")
        if code == -signal.SIGXCPU:
            return self._too_much(f"takes more than {self._expansion.seconds} s of processor time")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return self._broken(f"the process that reads it was ended ({how})")

    def _too_much(self, said: str) -> BatchFileError:
        return BatchFileError(
            f"{self._label}: {said}, which is too much for a {self._described} file of {self._size:,} bytes; "
            "write it with smaller pages and row groups, divide it, or hand it in as JSON lines"
        )

    def _broken(self, said: str) -> BatchFileError:
        return BatchFileError(f"{self._label}: cannot be read as {self._described}: {said}")


def _read_other(found: dict[str, Any]) -> Any:
    """Decode an object, or a value without a JSON form, which the checks of rows refuse by its type's
    name."""
    if found.keys() != {_OTHER_TYPE}:
        return found
    return type(str(found[_OTHER_TYPE]), (), {})()
