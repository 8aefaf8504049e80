"""Safe writing of files named by users: checked, locked, and never replacing a foreign file.

A destination is a regular file or a free name. An existing file is replaced only if all its rows belong to
the batch, or if the user says so; the input of the batch is never replaced. `.NAME.partial` in the same
folder is the lock against other processes, and receives the new content until it is complete. It is removed
at the end, also after a failure; one left behind by a killed process is taken over by the next.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Self

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.formats.ours import ForeignFileError, job_ids
from nightmill.jobs.formats.output import ResultFile, writing
from nightmill.jobs.formats.rows import FileFormat

Owns = Callable[[list[str]], bool]
"""Returns True if all these jobs belong to the batch."""

_ENDINGS = {
    ".jsonl": FileFormat.JSONL,
    ".ndjson": FileFormat.JSONL,
    ".json": FileFormat.JSONL,
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.CSV,
    ".parquet": FileFormat.PARQUET,
    ".pq": FileFormat.PARQUET,
    ".arrow": FileFormat.ARROW,
    ".feather": FileFormat.ARROW,
    ".ipc": FileFormat.ARROW,
}
_USUAL = Dialect()
_OTHERS = frozenset(
    [
        ".xlsx",
        ".xls",
        ".ods",
        ".arrows",
        ".orc",
        ".avro",
        ".db",
        ".sqlite",
        ".sqlite3",
        ".zip",
        ".zst",
        ".bz2",
        ".xz",
    ]
)
"""Endings of formats that are not written; any other that is unknown is a name for the input's format."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_IDS = 500  # ids per lookup
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)  # errors of network file systems without locks


class Destination:
    """A file for the results or (`errors`) the errors of a batch, reserved until it is closed.

    `apart_from` has the files that it must not be (the input, the other output), by description. `label` is
    its name for people, if not the path, `layout` that of its rows, if it is not as usual, and `dialect` that
    of the input's CSV. Call `vet` first; then either `grow` the file row by row, or `replace` it as a whole.

    Raises BatchFileError, here and in every method, if it cannot or must not be written.
    """

    def __init__(
        self,
        path: str | Path,
        format: FileFormat,
        *,
        errors: bool = False,
        overwrite: bool = False,
        apart_from: Mapping[str, Path] | None = None,
        label: str | None = None,
        layout: Layout | None = None,
        dialect: Dialect = _USUAL,
    ) -> None:
        self.path = Path(path)
        self._label = str(path) if label is None else label
        self.layout = layout or Layout(self._chosen(format), errors, dialect.named(self.path))
        self.format = self.layout.format
        """The format in which the rows are written: by the name's ending, or as the input."""
        self._kind = "errors" if errors else "results"
        self._overwrite = overwrite
        self._apart_from = apart_from or {}
        self._vetted: Callable[[], None] | None = None
        self._known: tuple[int, int] | None = None  # identity of the checked file; None: the name was free
        self._lock: int | None = None
        self._check_name()
        with writing(self._label):
            self._target = Path(os.path.realpath(self.path))
            if not self._target.parent.exists():
                raise self._refusal(f"there is no folder {self._target.parent}: make it, or name another")
            self._check_kind()
            self._partial = partial_of(self._target)
            self._check_apart()
            self._take_lock()

    def vet(self, batch: str, owns: Owns, fingerprint: str | None = None) -> None:
        """Refuse an existing file unless it belongs to this batch, or may be overwritten and is not its
        input.

        `fingerprint`: the SHA-256 of the input, to recognise it under other names.
        """

        def check() -> None:
            self._check_kind()
            self._check_apart()
            self._known = _inode(self._target)
            if self._known is None or self._holds_only(owns):
                return
            if self.path.is_symlink():
                raise self._refusal(
                    f"is a link to {self._target}, which is not of batch {batch!r}: name that file itself, "
                    "or another"
                )
            if not self._overwrite:
                raise self._refusal(
                    f"is there already, and is not of batch {batch!r}: a changed input, template, model or "
                    "parameter is another batch; name another file, remove this one, or give --overwrite "
                    "(overwrite=True)"
                )
            if fingerprint is not None and _digest(self._target) == fingerprint:
                raise self._refusal(f"holds the prompts of batch {batch!r}: name another file")

        with writing(self._label):
            check()
        self._vetted = check

    def grow(self, *, anew: bool = False) -> ResultFile:
        """Open the file for appending; empty it first if `anew` or if it is overwritten."""
        with writing(self._label):
            self._check_again()
            if anew or self._overwrite:
                self._target.unlink(missing_ok=True)  # not truncated: it may have other hard links
            file = ResultFile(
                self._target,
                self.format,
                append=_inode(self._target) is not None,
                label=self._label,
                layout=self.layout,
            )
            self._known = _inode(self._target)
        return file

    @contextmanager
    def replace(self) -> Iterator[ResultFile]:
        """Write a new file that atomically takes the name at the end; an exception changes nothing."""
        file = ResultFile(self._partial, self.format, label=self._label, layout=self.layout)
        try:
            yield file
            file.close()
        except BaseException:  # Ctrl-C must not leave a partial file behind, either
            file.discard()
            if self._lock is not None:  # the same file; on a full disk its space is needed
                with suppress(OSError):
                    os.ftruncate(self._lock, 0)
            raise
        with writing(self._label):
            self._check_again()
            if self._lock is not None:  # the same file
                os.fsync(self._lock)
            self._partial.replace(self._target)
            self._known = _inode(self._target)

    def holds(self, ids: Collection[str]) -> bool:
        """Return True if the file has the rows of exactly these jobs."""
        with writing(self._label):
            try:
                found = list(self._job_ids())
            except ForeignFileError:
                return False
        return len(found) == len(ids) and set(found) == set(ids)

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with writing(self._label):
            if _inode(self._partial) == _inode_of(os.fstat(lock)):
                self._partial.unlink()
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _check_name(self) -> None:
        name = self.path.name.lower()
        if str(self.path) == "-":
            raise self._refusal("standard output is not supported: name a file")
        if name.endswith(".gz"):
            raise self._refusal(f"{self._kind} are not compressed: name a file without .gz")
        suffix = Path(name).suffix
        if suffix in _OTHERS:
            raise self._refusal(
                f"ends in {suffix}, in which no {self._kind} are written: name a file that ends in .csv, "
                ".tsv, .jsonl, .parquet or .arrow"
            )
        if self.format is FileFormat.OPENAI and _ENDINGS.get(suffix, FileFormat.JSONL) != FileFormat.JSONL:
            raise self._refusal(
                f"ends in {suffix}, but the {self._kind} of OpenAI's rows are JSON lines, as these: "
                "name a file that ends in .jsonl (for others: Batch.to_pandas() or .results() in Python)"
            )

    def _chosen(self, format: FileFormat) -> FileFormat:
        """Rows of ours may be written in any of the formats; OpenAI's rows have results of their own."""
        if format is FileFormat.OPENAI:
            return format
        chosen = _ENDINGS.get(self.path.suffix.lower(), format)
        if chosen is FileFormat.ARROW:
            raise self._refusal("Arrow is for tables with a template: name a file that ends in .parquet")
        return chosen

    def _check_kind(self) -> None:
        """Check that the path is a regular file or free."""
        with suppress(FileNotFoundError):
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode):
                kind = _KINDS.get(stat.S_IFMT(mode), "something else")
                raise self._refusal(f"is {kind}, not a regular file: name a file")
            return
        if self.path.is_symlink():
            raise self._refusal(f"is a link to {self._target}, which is not there: name that file itself")

    def _check_apart(self) -> None:
        mine = {_identity(self._target), _identity(self._partial)}
        for what, other in self._apart_from.items():
            real = Path(os.path.realpath(other))
            if mine & {_identity(real), _identity(partial_of(real))}:
                raise self._refusal(f"is also {what} ({other}): name another file for the {self._kind}")

    def _take_lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while self._lock is None:
            lock = os.open(self._partial, flags, 0o666)
            try:
                found = os.fstat(lock)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                    raise self._refusal(f"cannot be written: {self._partial} is in the way; remove it")
                _flock(lock)
                if _inode(self._partial) == _inode_of(found):  # not renamed or removed by the previous holder
                    self._lock, lock = lock, -1
            except BlockingIOError:
                raise self._refusal(
                    "another process is writing it: wait until that has ended, or name another file"
                ) from None
            finally:
                if lock >= 0:
                    os.close(lock)

    def _holds_only(self, owns: Owns) -> bool:
        ids = self._job_ids()
        try:
            while some := list(islice(ids, _IDS)):
                if not owns(some):
                    return False
        except ForeignFileError:
            return False
        return True

    def _job_ids(self) -> Iterator[str]:
        return job_ids(self._target, self.format, errors=self.layout.errors, layout=self.layout)

    def _check_again(self) -> None:
        """Refuse a file that somebody has put there since `vet`."""
        if self._vetted is None:
            raise RuntimeError("a destination is vetted before it is written")
        if _inode(self._target) not in (None, self._known):
            self._vetted()

    def _refusal(self, why: str) -> BatchFileError:
        return BatchFileError(f"{self._label}: {why}")


def partial_of(path: Path) -> Path:
    """Return the path of a file's new content until it is complete, locked by its writer."""
    return path.with_name(f".{path.name}.partial")


def _flock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _identity(path: Path) -> tuple[object, ...]:
    """Return a key that is equal for two names of one file, even if it does not exist yet."""
    if inode := _inode(path):
        return inode
    parent = _inode(path.parent)
    return (path,) if parent is None else (*parent, path.name)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        return _inode_of(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _inode_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
