"""Input files: detection of their format, rows in bounded memory, reading progress."""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from nightmill.jobs.base.contract import JsonObject, Prompt
from nightmill.jobs.base.stepping import exhaust
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError, EmptyBatchFileError, RowCode
from nightmill.jobs.formats.csvfile import UTF_16_AS_UTF8, dialect_of, read_csv
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.jsonlines import read_objects
from nightmill.jobs.formats.openai import openai_job
from nightmill.jobs.formats.parquet import read_parquet
from nightmill.jobs.formats.parquet_reader import Expansion, ParquetReader
from nightmill.jobs.formats.plain import plain_job
from nightmill.jobs.formats.rows import (
    OF_PROMPTS,
    FileFormat,
    InputRow,
    RowError,
    bad_row,
    other_format,
    printable,
    read_row,
)
from nightmill.jobs.formats.seen import SeenIds
from nightmill.jobs.request.spec import JobSpec

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CSV_SUFFIXES = (".csv", ".tsv")
_PARQUET_SUFFIXES = (".parquet", ".pq")
ENDINGS = (*_JSON_SUFFIXES, *_CSV_SUFFIXES, *_PARQUET_SUFFIXES, ".arrow", ".feather", ".ipc", ".arrows")
"""Endings of the names of inputs, before `.gz`."""
_ROWS_TO_LOOK_AT = 100  # searched for a valid row that shows which JSON format it is
_HASHED_AT_ONCE = 1 << 20  # bytes
STDIN = "standard input"
"""The name of an input that has none, for messages."""
_NAME_IT = "name it .jsonl, .csv, .tsv or .parquet"
_UNREADABLE = {
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it (zstd -d FILE)",
    b"\xfd7zXZ\x00": "packed with xz; unpack it (xz -dk FILE)",
    **{b"BZh%d1AY&SY" % level: "packed with bzip2; unpack it (bzip2 -dk FILE)" for level in range(1, 10)},
    b"\x04\x22\x4d\x18": "packed with lz4; unpack it (lz4 -d FILE)",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it, and name a file of it",
    b"PK\x03\x04": "a ZIP archive or a workbook; unpack it, or save the sheet as CSV in UTF-8",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a workbook of old Excel; save the sheet as CSV in UTF-8",
    b"FEA1\x00\x00": "Feather of version 1; write it with version 2, as pandas and Polars do",
    b"Obj\x01": "Avro; write it as Parquet",
    b"SQLite format 3\x00": "a database of SQLite; name its rows with --query and --from",
}
"""First bytes of formats that are not read, and the remedy for each."""
GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file."""
_OPENAI_KEYS = frozenset({"method", "url", "body"})

NOTHING_SAID = JobSpec()

Record = tuple[int, JsonObject | RowError]


class InputFile:
    """A batch file. Every call of `rows` reads it from the beginning.

    The format is detected from the name's ending (`.gz` is decompressed, except for Parquet) and the first
    rows, unless it is given. `label` is its name for people, if not the path, and `name` the one whose ending
    counts. If the file is not `trusted`, its expansion is limited in proportion to its size. Raises
    BatchFileError if the file does not exist or its format is unknown, BatchFileUnavailableError if it cannot
    be read, MissingExtraError for Parquet without pyarrow.
    """

    immutable = False
    """True if the content cannot change, so that checks for changes are skipped."""
    formats = OF_PROMPTS
    """The formats that it may have."""
    plain_remedy = "give plain rows a file of their own"
    """Remedy in the error for plain rows in a file of OpenAI's format."""

    def __init__(
        self,
        path: str | Path,
        format: FileFormat | None = None,
        *,
        label: str | None = None,
        name: str | None = None,
        trusted: bool = True,
    ) -> None:
        self.path = Path(path)
        self._name = self.path.name if name is None else name
        self._trusted = trusted
        self.label = str(path) if label is None else label
        self._stream: BinaryIO | None = None
        self._position = 0
        self._stamp: _Stamp | None = None  # taken with the fingerprint
        self._fingerprint: str | None = None
        with self._errors():
            if not self.path.is_file():
                if not self.path.exists():
                    raise BatchFileUnavailableError(f"{self.label}: there is no such file")
                raise BatchFileError(f"{self.label}: is not a file")
            if not self.size:
                raise EmptyBatchFileError(f"{self.label}: is empty; write one row on each line")
            self.format = format or self._find_format()
            if self.format not in self.formats:
                raise BatchFileError(f"{self.label}: is an Arrow file, which takes a template (--template)")

    def rows(self, defaults: JobSpec = NOTHING_SAID) -> Iterator[InputRow]:
        """Yield every row, checked; `defaults` apply where a row has no value.

        A bad row does not raise; BatchFileError is for the file as a whole.
        """
        openai = self.format is FileFormat.OPENAI
        read = openai_job if openai else plain_job
        self._position = 0
        seen = SeenIds()
        empty = True
        for number, record in self._records():
            empty = False
            if isinstance(record, RowError):
                yield bad_row(number, record)
            else:
                row = read_row(number, record, read, defaults, id_required=openai)
                if row.spec is None and (error := other_format(record, self.format, self.plain_remedy)):
                    row = bad_row(number, error, row.custom_id)
                yield _unless_duplicate(row, seen)
        if empty:
            raise EmptyBatchFileError(f"{self.label}: holds no rows; write one row on each line")

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file's bytes in hexadecimal."""
        return exhaust(self.hashing())

    def hashing(self) -> Generator[None, None, str]:
        """Compute the fingerprint in small steps; yields between steps."""
        with self._errors(), self.path.open("rb") as file:
            stamp, digest = _stamp(os.fstat(file.fileno())), hashlib.sha256()
            while piece := file.read(_HASHED_AT_ONCE):
                digest.update(piece)
                yield
        self._stamp, self._fingerprint = stamp, digest.hexdigest()
        return self._fingerprint

    @property
    def taken(self) -> str | None:
        """The fingerprint that was taken last."""
        return self._fingerprint

    def changed(self, fingerprint: str | None = None) -> bool:
        """Return True if the file's identity, size or modification time changed since its fingerprint was
        taken.

        With `fingerprint`, the content is read and compared, too. It is also read if only the inode's change
        time differs: chmod, chown and hard links set that without changing the content, but so does a writer
        that sets the modification time back. Raises BatchFileUnavailableError.
        """
        if self.immutable:
            return False
        before, taken = self._stamp, self._fingerprint
        with self._errors():
            try:
                now = _stamp(self.path.stat())
            except FileNotFoundError:
                return True
            if before is None or now[0] != before[0]:
                return True
            if now == before and fingerprint is None:
                return False
            again = self.fingerprint()
        return again != (fingerprint or taken) or self._stamp is None or self._stamp[0] != before[0]

    @property
    def size(self) -> int:
        """The file's size on disk, in bytes."""
        return self.path.stat().st_size

    @property
    def position(self) -> int:
        """The number of these bytes that the latest `rows` has read."""
        if self._stream is not None:
            self._position = self._stream.tell()
        return self._position

    @property
    def dialect(self) -> Dialect:
        """The dialect of its CSV, and of its results in CSV; the usual one if it has another format.

        Raises BatchFileError.
        """
        if self.format is not FileFormat.CSV:
            return Dialect()
        with self._errors(), self._open() as stream:
            return self._dialect(stream)

    def _dialect(self, stream: BinaryIO) -> Dialect:
        return dialect_of(stream, of_prompts=True)

    def reader_of_rows(self) -> ParquetReader | None:
        """Start the process that reads the rows, which whoever gets it ends; None if no process reads them.

        Raises BatchFileError and MissingExtraError.
        """
        if self.format is not FileFormat.PARQUET:
            return None
        with self._errors():
            expansion = Expansion() if self._trusted else Expansion.of_stranger(self.size)
        return ParquetReader(self.path, self.label, expansion)

    def _records(self, reader: ParquetReader | None = None) -> Iterator[Record]:
        """Every record; `reader` is the process of `reader_of_rows` if that is started already."""
        if (reader := reader or self.reader_of_rows()) is not None:
            yield from read_parquet(reader, self.label, self._note_share)
            return
        with self._errors(), self._open() as stream:
            if self.format is FileFormat.CSV:
                text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
                yield from read_csv(text, self.label)
            else:
                yield from read_objects(stream)

    def _note_share(self, share: float) -> None:
        self._position = int(self.size * share)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """Open the file's bytes, decompressed."""
        with self.path.open("rb") as raw:
            self._stream = raw
            try:
                if self.path.suffix == ".gz":
                    with gzip.GzipFile(fileobj=raw) as unpacked:
                        yield cast(BinaryIO, io.BufferedReader(unpacked))
                else:
                    yield raw
            finally:
                if not raw.closed:  # as it is where nobody has read to the end, and both are garbage
                    self._position = raw.tell()
                self._stream = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BatchFileError(f"{self.label}: is a broken gzip file: {error}") from error
        except OSError as error:
            said = f"{self.label}: cannot be read: {error.strerror or error}"
            raise BatchFileUnavailableError(said) from error

    def _start(self) -> bytes:
        """Return the first bytes; raises BatchFileError if they are compressed and nothing decompresses
        them."""
        with self._open() as stream:
            start = stream.read(64)
        if start.startswith(GZIP):
            raise BatchFileError(f"{self.label}: is packed with gzip; unpack it")
        for magic, what in _UNREADABLE.items():
            if start.startswith(magic):
                raise BatchFileError(f"{self.label}: is {what}")
        return start

    def _table_format(self, start: bytes) -> FileFormat | None:
        """Detect CSV, Parquet or Arrow by name and first bytes; None if it is none of them."""
        name = self._name.lower().removesuffix(".gz")
        if name.endswith(_CSV_SUFFIXES):
            return FileFormat.CSV
        if start.startswith(b"ARROW1"):
            return FileFormat.ARROW
        if name.endswith(_PARQUET_SUFFIXES) or start.startswith(b"PAR1"):
            return FileFormat.PARQUET
        return None

    def _find_format(self) -> FileFormat:
        name = self._name.lower().removesuffix(".gz")
        start = self._start()
        if (table := self._table_format(start)) is not None:
            return table
        if start.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise BatchFileError(f"{self.label}: is UTF-16; {UTF_16_AS_UTF8}")
        if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise BatchFileError(
                f"{self.label}: is one JSON list; write one object on each line, e.g. with "
                f"`jq -c '.[]' {self._name} > rows.jsonl`"
            )
        if not name.endswith(_JSON_SUFFIXES) and b"{" not in start:
            remedy = f"{_NAME_IT}, or say which it has (--format)" if self._trusted else _NAME_IT
            if self.label == STDIN:
                remedy = "say which it has (--format csv, or jsonl)"
            raise BatchFileError(f"{self.label}: has no known format; {remedy}")
        with self._open() as stream:
            objects = (record for _, record in islice(read_objects(stream), _ROWS_TO_LOOK_AT))
            first = next((record for record in objects if isinstance(record, dict)), {})
        return FileFormat.OPENAI if _OPENAI_KEYS & first.keys() else FileFormat.JSONL


_Stamp = tuple[tuple[int, ...], int]


def _stamp(found: os.stat_result) -> _Stamp:
    """Identity and version of a file; ctime cannot be set back, so a write always changes it."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns), found.st_ctime_ns


def rows_from(
    items: Iterable[Prompt | Mapping[str, Any]], defaults: JobSpec = NOTHING_SAID
) -> Iterator[InputRow]:
    """Check the items of an iterable, prompts or mappings with the keys of plain rows, like the rows of a
    file."""
    seen = SeenIds()
    for number, item in enumerate(items, 1):
        values: Mapping[str, Any] = item if isinstance(item, Mapping) else {"prompt": item}
        yield _unless_duplicate(read_row(number, values, plain_job, defaults), seen)


def _unless_duplicate(row: InputRow, seen: SeenIds) -> InputRow:
    if row.custom_id is None or (earlier := seen.add(row.custom_id, row.number)) is None:
        return row
    message = f"custom_id: {row.custom_id!r} is also that of row {earlier}; give each row its own"
    error = RowError(RowCode.DUPLICATE_CUSTOM_ID, printable(message), "custom_id")
    return bad_row(row.number, error, row.custom_id)
