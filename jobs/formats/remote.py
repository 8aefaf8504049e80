"""Files behind URLs, through fsspec: copied to this disk for reading, uploaded once complete.

Parts of a URL besides host and path may be secret (a password, a signature), and so may be errors of
libraries: neither is shown or stored.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy as copy_of
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import BatchFileError, MissingExtraError
from nightmill.jobs.formats.copying import copy
from nightmill.jobs.formats.together import is_input

READABLE = ("s3", "gs", "hf", "https", "http")
WRITABLE = ("s3", "gs")  # where an object appears atomically
_LISTED = ("s3", "gs", "hf")  # where patterns and folders can be told from names
_ABSENT = (404, 410)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_VERSION = ("size", "ETag", "etag", "generation", "mtime", "LastModified", "updated", "created")
"""Keys of a file's metadata that identify its content, if the file system has them."""


def is_remote(name: str) -> bool:
    """Return True if the name is a URL."""
    return _SCHEME.match(name) is not None


class RemoteFile:
    """A file behind a URL. Every method may raise BatchFileError and MissingExtraError."""

    def __init__(self, url: str) -> None:
        scheme = str(_SCHEME.match(url)[1]).lower()  # type: ignore[index]
        self.label = _shown(url)
        self._scheme = scheme
        if scheme not in READABLE or "::" in url:
            known = ", ".join(f"{one}://" for one in READABLE)
            raise BatchFileError(f"{self.label}: cannot be read from there; known are {known}, and paths")
        self.name = _local_name(self.label.rpartition("/")[2])
        self._system, self._path = self._open(url)

    def check_writable(self) -> None:
        """Refuse a file system on which an incomplete file would be visible."""
        if self._scheme not in WRITABLE:
            known = " or ".join(f"{one}://" for one in WRITABLE)
            raise BatchFileError(f"{self.label}: can only be read; name a file, or one of {known}")

    def version(self) -> dict[str, Any] | None:
        """Return the metadata that identifies its content; None if there is no such file."""
        with self._errors():
            self._system.invalidate_cache()
            try:
                found = self._system.info(self._path)
            except FileNotFoundError as error:
                cause = error.__cause__  # over HTTP it is raised for any failure
                absent = isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in _ABSENT
                if cause is not None and not absent:
                    raise cause from None
                return None
        return {name: found[name] for name in _VERSION if name in found}

    def fetch(self, path: Path, most: int) -> None:
        """Copy it to `path`, if it has at most `most` bytes and does not change meanwhile."""
        version = self.version()
        if version is None:
            raise BatchFileError(f"{self.label}: there is no such file")
        if (version.get("size") or 0) > most:
            raise BatchFileError(f"{self.label}: has {version['size']:,} bytes; raise NIGHTMILL_SPOOL_BYTES")
        with self._errors(), self._system.open(self._path, "rb") as stream:
            copied = copy(stream, path, self.label, most)
        if version.get("size") not in (None, copied):
            raise BatchFileError(f"{self.label}: ended after {copied:,} of {version['size']:,} bytes")
        if self.version() != version:
            raise BatchFileError(f"{self.label}: changed while it was read; try again")

    @property
    def is_several(self) -> bool:
        """True for a pattern, and for a folder (its name ends in a slash), where such can be listed."""
        return self._scheme in _LISTED and ("*" in self.label or self.label.endswith("/"))

    def fetch_all(self, folder: Path, most: int) -> Path:
        """Copy what matches this pattern, or is in this folder, if it has at most `most` bytes together.

        Returns the folder of the copies, whose names keep the order of the originals.
        """
        with self._errors():
            found = self._system.glob(self._path) if "*" in self._path else self._system.find(self._path)
            paths = sorted(path for path in found if is_input(Path(path)))
        if not paths:
            raise BatchFileError(f"{self.label}: there is no such file")
        copies = folder / _local_name(self.label.rstrip("/*").rpartition("/")[2])
        copies.mkdir()
        for number, path in enumerate(paths):
            one = copy_of(self)
            one._path, one.label = path, f"{self._scheme}://{path}"
            target = copies / f"{number:06d}-{_local_name(path.rpartition('/')[2])}"
            one.fetch(target, most)
            most -= target.stat().st_size
        return copies

    def put(self, path: Path) -> None:
        """Upload `path` in its place."""
        with self._errors():
            self._system.put_file(str(path), self._path)

    def _open(self, url: str) -> tuple[Any, str]:
        try:
            import fsspec
        except ModuleNotFoundError:
            raise MissingExtraError(
                f"{self._scheme}:// needs the package fsspec: {pip_install('remote')}"
            ) from None
        try:
            with self._errors():
                system, path = fsspec.core.url_to_fs(url)
        except ImportError:
            package = _PACKAGES.get(self._scheme, "aiohttp")
            raise MissingExtraError(
                f"{self._scheme}:// needs the package {package}: pip install {package}"
            ) from None
        return system, path

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BatchFileError, ImportError):
            raise
        except FileNotFoundError:
            raise BatchFileError(f"{self.label}: there is no such file") from None
        except PermissionError:
            raise BatchFileError(f"{self.label}: access is denied; are there credentials for it?") from None
        except Exception as error:
            status = getattr(error, "status", None)
            said = f"status {status}" if status else getattr(error, "strerror", None) or type(error).__name__
            raise BatchFileError(f"{self.label}: cannot be reached: {said}") from error


def _local_name(name: str) -> str:
    """Return a name that is one of a file, and not hidden."""
    return re.sub(r"[^\w.-]", "-", name).lstrip("._") or "rows"


def _shown(url: str) -> str:
    """Return scheme, host and path."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets without an address
        return f"{url.partition('://')[0]}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
