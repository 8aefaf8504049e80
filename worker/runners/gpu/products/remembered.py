"""Keeps the ways that were fastest in the user's cache: to time all anew at each start takes 10 s and more.

A file holds what one GPU found with one set of kernels: a change of kernels, compiler, library, driver or
card leads to another. In it a way counts only among the kernels that it was timed with: where there are
others, all are timed. It is taken only if it is still there and still gives the bits that it should
(`Agreement`), so that whatever is in a file, whoever wrote it, can cost time and nothing else. Times that
differed from one run to the next are not kept, as they do where others use the GPU, too. A file is begun anew
30 days after it was, and where a kernel fails in a start that took ways from it.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from nightmill.worker.runners.gpu.device.compiler import cache_directory, compiler_release, kernel_revision
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["RememberedChoices", "choices_file"]

log = logging.getLogger(__name__)

_FORMAT = 2  # change it to make every file stale
_LASTING_SECONDS = 30 * 86400.0
_AHEAD_SECONDS = 86400.0  # by which the clock of who began a file may be ahead of ours
_MOST_BYTES = 4 << 20  # of a file that is read

Found = dict[str, dict[str, str]]
"""Names of ways by number of rows and kernels (`_place`), by what they compute."""


def choices_file(device: Device, beside: str) -> Path:
    """The file of what was found on a device.

    beside  whatever else times hang on: elements, the cache's format, the library
    """
    key = (
        _FORMAT, device.name, device.architecture, device.multiprocessors, device.driver_version,
        kernel_revision(), compiler_release(), beside,
    )  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_directory().parent / "choices" / f"{digest[:32]}.json"


class RememberedChoices:
    """The names of the ways that were fastest.

    path  of the file; None: nothing is remembered
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: Found = {} if path is None else _read(path)[1]
        self._new: Found = {}
        self._used = False

    def find(self, what: str, rows: int, kernels: Iterable[str]) -> str | None:
        """Return the name of the way that was fastest for so many rows; None: it is not known.

        kernels  names of those that there are to choose from
        """
        name = self._found.get(what, {}).get(_place(rows, kernels))
        self._used = self._used or name is not None
        return name

    def note(self, what: str, rows: int, kernels: Iterable[str], name: str) -> None:
        """Remember the fastest way."""
        self._new.setdefault(what, {})[_place(rows, kernels)] = name

    @property
    def noted(self) -> int:
        """The number of ways that are not in the file yet."""
        return sum(map(len, self._new.values()))

    def save(self) -> None:
        """Add what is new to the file, which others may have changed since; losing it costs time alone."""
        if self._path is None or not self._new:
            return
        begun, found = _read(self._path)
        for what, ways in self._new.items():
            found[what] = found.get(what, {}) | ways
        if len(text := _text(begun, found)) > _MOST_BYTES:
            text = _text(time.time(), self._new)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".tmp")
            written = Path(name)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            log.info("what was fastest is not kept, so that the next start times it again: %s", error)
            return
        self._new = {}

    def distrust(self) -> None:
        """Forget all if any was found: a kernel has failed in this start, and may at the next one."""
        if self._used:
            self.forget()

    def forget(self) -> None:
        """Remove the file, and take nothing more from it: a kernel that it names may be at fault."""
        self._found, self._new = {}, {}
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed, and the next start takes its ways: %s", self._path, error)


def _place(rows: int, kernels: Iterable[str]) -> str:
    names = "\n".join(sorted(set(kernels)))
    return f"{rows} of {hashlib.sha256(names.encode()).hexdigest()[:12]}"


def _text(begun: float, found: Found) -> str:
    return json.dumps({"begun": begun, "fastest": found})


def _read(path: Path) -> tuple[float, Found]:
    """When a file was begun, and its names; now, and none, if it is too old, cannot be read, or is not ours.

    The time is in the file, since whoever adds to it writes it anew.
    """
    now = time.time()
    nothing: tuple[float, Found] = now, {}
    try:
        held = json.loads(_content(path))
    except (OSError, ValueError, RecursionError):
        return nothing
    if not isinstance(held, dict):
        return nothing
    begun, fastest = held.get("begun"), held.get("fastest")
    if not isinstance(begun, float) or not -_AHEAD_SECONDS <= now - begun <= _LASTING_SECONDS:
        return nothing
    if not isinstance(fastest, dict):
        return nothing
    return begun, {
        what: {place: name for place, name in ways.items() if isinstance(name, str)}
        for what, ways in fastest.items()
        if isinstance(ways, dict)
    }


def _content(path: Path) -> bytes:
    """The bytes of a file of usual size; none of any other, nor of a pipe or a device, which have no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for whoever writes
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return b""
        with open(handle, "rb", closefd=False) as file:
            content = file.read(_MOST_BYTES + 1)
    finally:
        os.close(handle)
    return content if len(content) <= _MOST_BYTES else b""
