"""The one way to write a file that a user has named: checked, locked, and never in place of something else.

A destination is a regular file, or a name that is free. What is there is replaced only if each of its
rows is of the batch at hand, or if the user says so; the input of the batch is never replaced.
`.NAME.partial` beside it is the lock that keeps other processes away, and takes the new content until that
is whole. It is removed at the end, also of a failure; a process that was killed leaves it behind, for the
next one to take over.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Self

from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.ours import ForeignFileError, job_ids
from nightmill.jobs.formats.output import ResultFile
from nightmill.jobs.formats.rows import FileFormat

Owns = Callable[[list[str]], bool]
"""Are all these jobs of the batch?"""

_ENDINGS = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".parquet": "Parquet",
    ".pq": "Parquet",
}
_WANTED = {
    FileFormat.OPENAI: ("JSON lines", ".jsonl"),
    FileFormat.JSONL: ("JSON lines", ".jsonl"),
    FileFormat.CSV: ("CSV", ".csv"),
    FileFormat.PARQUET: ("Parquet", ".parquet"),
}
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_IDS = 500  # looked up at once
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)  # of some network file systems


class Destination:
    """A file for the results or (`errors`) the errors of a batch, reserved until it is closed.

    `apart_from` names the files that it must not be, by what they are: the input, the other output. `label`
    is its name for people, if that is not its path. First `vet` says whose file it may be; then it is either
    grown, row by row, or replaced as a whole.

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
    ) -> None:
        self.path = Path(path)
        self._label = str(path) if label is None else label
        self._format = format
        self._kind = "errors" if errors else "results"
        self._overwrite = overwrite
        self._apart_from = apart_from or {}
        self._vetted: Callable[[], None] | None = None
        self._known: tuple[int, int] | None = None  # the file that was vetted; None: the name was free
        self._lock: int | None = None
        self._check_name()
        with self._errors():
            self._target = Path(os.path.realpath(self.path))
            self._check_kind()
            self._partial = partial_of(self._target)
            self._check_apart()
            self._take_lock()

    def vet(self, batch: str, owns: Owns, fingerprint: str | None = None) -> None:
        """Refuse what is there, unless it is of this batch, or may be overwritten and is not its input.

        `fingerprint`: the SHA-256 of the input, for files that are found again under other names.
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
                    f"is there already, and is not of batch {batch!r}: name another file, remove this one, "
                    "or give --overwrite (overwrite=True)"
                )
            if fingerprint is not None and _digest(self._target) == fingerprint:
                raise self._refusal(f"holds the prompts of batch {batch!r}: name another file")

        with self._errors():
            check()
        self._vetted = check

    def grow(self, *, anew: bool = False) -> ResultFile:
        """Open the file itself, to go on with its rows; without them if `anew` or if it is overwritten."""
        with self._errors():
            self._check_again()
            if anew or self._overwrite:
                self._target.unlink(missing_ok=True)  # not emptied: it may have other names
            file = ResultFile(
                self._target,
                self._format,
                errors=self._kind == "errors",
                append=_inode(self._target) is not None,
                label=self._label,
            )
            self._known = _inode(self._target)
        return file

    @contextmanager
    def replace(self) -> Iterator[ResultFile]:
        """Rows written here take the name at the end, at one stroke; an exception changes nothing."""
        file = ResultFile(self._partial, self._format, errors=self._kind == "errors", label=self._label)
        try:
            yield file
            file.close()
        except BaseException:  # Ctrl-C too must not leave a partial file behind
            file.discard()
            raise
        with self._errors():
            self._check_again()
            if self._lock is not None:  # the same file
                os.fsync(self._lock)
            self._partial.replace(self._target)
            self._known = _inode(self._target)

    def close(self) -> None:
        """Let others write it."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with self._errors():
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
        wanted, ending = _WANTED[self._format]
        if name.endswith(".gz"):
            raise self._refusal(f"{self._kind} are not compressed: name a file without .gz")
        suffix = Path(name).suffix
        if suffix in _ENDINGS and _ENDINGS[suffix] != wanted:
            raise self._refusal(
                f"ends in {suffix}, but the {self._kind} of this batch are {wanted}, as its input: "
                f"name a file that ends in {ending}"
            )

    def _check_kind(self) -> None:
        """It is a regular file, or the name is free."""
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
                if _inode(self._partial) == _inode_of(found):  # not renamed or removed by the last holder
                    self._lock, lock = lock, -1
            except BlockingIOError:
                raise self._refusal(
                    "another process is writing it: wait until that has ended, or name another file"
                ) from None
            finally:
                if lock >= 0:
                    os.close(lock)

    def _holds_only(self, owns: Owns) -> bool:
        ids = job_ids(self._target, self._format, errors=self._kind == "errors")
        try:
            while some := list(islice(ids, _IDS)):
                if not owns(some):
                    return False
        except ForeignFileError:
            return False
        return True

    def _check_again(self) -> None:
        """A night is long: somebody may have put another file there since it was vetted."""
        if self._vetted is None:
            raise RuntimeError("a destination is vetted before it is written")
        if _inode(self._target) not in (None, self._known):
            self._vetted()

    def _refusal(self, why: str) -> BatchFileError:
        return BatchFileError(f"{self._label}: {why}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror or error}") from error


def partial_of(path: Path) -> Path:
    """Where the content of a file is until it is whole; locked by whoever writes it."""
    return path.with_name(f".{path.name}.partial")


def _flock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _identity(path: Path) -> tuple[object, ...]:
    """Equal for two names of one file, also of one that is not there yet."""
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
