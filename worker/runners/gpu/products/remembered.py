"""Keeps the ways that were fastest in the user's cache: to time all anew at each start takes 10 s and more.

A file holds what one GPU found with one set of kernels: a change of kernels, compiler, library, driver or
card leads to another. A way is taken from it only if it is still there and still gives the bits that it
should (`Agreement`); whatever is missing is timed. Times that differed from one run to the next are not kept,
as they do where others use the GPU, too. After 30 days a file is begun anew.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from nightmill.worker.runners.gpu.device.compiler import cache_directory, compiler_release, kernel_revision
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["RememberedChoices", "choices_file"]

log = logging.getLogger(__name__)

_FORMAT = 1  # change it to make every file stale
_LASTING_SECONDS = 30 * 86400.0
_MOST_BYTES = 4 << 20  # of a file that is read

Found = dict[str, dict[str, str]]
"""Names of ways by the number of rows, by what they compute."""


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
        self._found: Found = {} if path is None else _read(path)
        self._new: Found = {}

    def find(self, what: str, rows: int) -> str | None:
        """Return the name of the way that was fastest for so many rows; None: it is not known."""
        return self._found.get(what, {}).get(str(rows))

    def note(self, what: str, rows: int, name: str) -> None:
        """Remember the fastest way."""
        self._new.setdefault(what, {})[str(rows)] = name

    def save(self) -> None:
        """Add what is new to the file, which others may have changed since; losing it costs time alone."""
        if self._path is None or not self._new:
            return
        found = _read(self._path)
        for what, ways in self._new.items():
            found[what] = found.get(what, {}) | ways
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".tmp")
            written = Path(name)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(found, file)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            log.info("what was fastest is not kept, so that the next start times it again: %s", error)
            return
        self._found, self._new = found, {}


def _read(path: Path) -> Found:
    """The names in a file; none if it is too old, cannot be read, or is none of ours."""
    try:
        about = path.stat()
        if about.st_size > _MOST_BYTES or time.time() - about.st_mtime > _LASTING_SECONDS:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        what: {rows: name for rows, name in ways.items() if isinstance(name, str)}
        for what, ways in found.items()
        if isinstance(ways, dict)
    }
