"""One file from a server to its place: resumed where it broke off, by one process at a time, and verified.

`huggingface_hub` downloads too, but begins again in each process and does not compare digests (2.4). Here a
partial file stays until it is whole. The package's session is used: its proxies, certificates, offline mode.
"""

import errno
import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
from filelock import Timeout
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, get_session, hf_raise_for_status

from nightmill.jobs.errors import ModelFetchError

_CHUNK: Final = 1 << 20
_TRIES: Final = 5  # in a row, without a byte in between
_FIRST_PAUSE: Final = 1.0  # seconds; each of the next is twice as long
_LONGEST_PAUSE: Final = 300.0  # that a server may ask for
_WAIT: Final = 0.5  # seconds between looks at another process's download
_BUSY: Final = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the transfer of one file, in bytes. `total` is None if the server does not say."""

    file: str
    done: int
    total: int | None
    note: str = ""


Report = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class Source:
    """Location of a file, and what is known of it. `headers` may hold a token: they are not shown."""

    url: str = field(repr=False)
    shown: str
    size: int | None
    sha256: str | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def transfer(source: Source, target: Path, *, partial: Path, lock: Path, report: Report) -> None:
    """Bring the file to `target`, through `partial`, which stays if this fails.

    Raises ModelFetchError for a wrong digest or size and for what the disk refuses; HfHubHTTPError and
    httpx2.HTTPError if the server does not give it.
    """

    def waiting() -> None:
        done = partial.stat().st_size if partial.exists() else 0
        report(Progress(source.shown, done, source.size, "another process is fetching it"))

    try:
        for folder in {target.parent, lock.parent}:
            folder.mkdir(parents=True, exist_ok=True)
        with _alone(lock, waiting):
            if target.exists():  # by the other process
                return
            if source.size is not None:
                _check_space(source, partial)
            _receive(source, partial, report)
            _verify(source, partial, report)
            partial.replace(target)
    except OSError as error:
        if isinstance(error, HfHubHTTPError):
            raise
        raise ModelFetchError(_disk_trouble(source, target.parent, error)) from error


@contextmanager
def _alone(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock that `huggingface_hub` takes for the same file."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=_WAIT))
                break
            except Timeout:
                waiting()
        yield


def _receive(source: Source, partial: Path, report: Report) -> None:
    """Fill `partial`, however often the connection breaks off, as long as each try brings something."""
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        if source.size is not None and before == source.size:
            return
        if source.size is not None and before > source.size:
            partial.unlink()
            before = 0
        pause = None
        try:
            _stream(source, partial, before, report)
            return
        except httpx2.TransportError as error:
            trouble: Exception = error
        except HfHubHTTPError as error:
            if error.response.status_code == 416:  # what is here is not the beginning of that file
                partial.unlink(missing_ok=True)
            elif error.response.status_code not in _BUSY:
                raise
            trouble, pause = error, _asked_pause(error.response.headers)
        after = partial.stat().st_size if partial.exists() else 0
        failures = 1 if after > before else failures + 1
        if failures > _TRIES:
            raise trouble
        seconds = _FIRST_PAUSE * 2 ** (failures - 1) if pause is None else pause
        report(Progress(source.shown, after, source.size, f"interrupted; going on in {seconds:.0f} s"))
        time.sleep(seconds)


def _stream(source: Source, partial: Path, have: int, report: Report) -> None:
    headers = {**source.headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", source.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status_code != 206 or not resumed:  # the server has ignored the range
            have = 0
        with partial.open("ab" if have else "wb") as file:
            for chunk in response.iter_bytes(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                report(Progress(source.shown, have, source.size))
                if source.size is not None and have > source.size:
                    break  # of another size than was announced: `_verify` says so


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait; None if it does not, or gives a date."""
    said = headers.get("Retry-After", "")
    return min(float(said), _LONGEST_PAUSE) if said.isdecimal() else None


def _verify(source: Source, partial: Path, report: Report) -> None:
    size = partial.stat().st_size
    if source.size is not None and size != source.size:
        partial.unlink()
        raise ModelFetchError(
            f"{source.shown} came with {size:,} bytes, and should have {source.size:,}. It was removed: try "
            "again, and if that does not help, ask whoever runs the server or a proxy before it"
        )
    if source.sha256 is None:
        return
    report(Progress(source.shown, size, source.size, "checking its sha256"))
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        partial.unlink()
        raise ModelFetchError(
            f"{source.shown} is damaged: its sha256 is {found}, and should be {source.sha256}. It was "
            "removed: try again"
        )


def require_space(model: str, files: Iterable[tuple[Source, Path]], folder: Path) -> None:
    """Raise ModelFetchError before anything is fetched if the files, by their partial ones, do not fit."""
    left = sum(_left(source, partial) for source, partial in files)
    folder = next(place for place in (folder, *folder.parents) if place.is_dir())
    if left > shutil.disk_usage(folder).free:
        raise ModelFetchError(_full(model, left, folder))


def _check_space(source: Source, partial: Path) -> None:
    if _left(source, partial) > shutil.disk_usage(partial.parent).free:
        raise OSError(errno.ENOSPC, "not enough space")


def _left(source: Source, partial: Path) -> int:
    """Bytes to fetch, as far as is known."""
    if source.size is None:
        return 0
    return max(source.size - (partial.stat().st_size if partial.exists() else 0), 0)


def _full(what: str, needed: int | None, folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    needs = "more" if needed is None else f"{needed / 1e9:.1f} GB"
    return (
        f"the disk is full: {what} needs {needs}, and {folder} has {free / 1e9:.1f} GB left. "
        "Free some, or set HF_HOME to a directory on a larger disk; what has been fetched is kept"
    )


def _disk_trouble(source: Source, folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(source.shown, source.size, folder)
    return (
        f"{source.shown} cannot be kept in {folder}: {error.strerror or error}. Set HF_HOME to a directory "
        "that you may write to"
    )
