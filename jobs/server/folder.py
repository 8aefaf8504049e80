"""The folder that holds the contents of files, each under the id of its row in SQL.

A content has another name while it is written, and until its row is there. So one without a row is always
under such a name, however a server has died, and is removed when it is a day old.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.ids import is_job_id
from nightmill.jobs.settings import make_data_dir

_COMING = ".coming"
_FORGOTTEN_SECONDS = 86_400.0  # longer than anything takes to come


class Folder:
    """Contents of files. Several servers may have one folder in common."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_data_dir(path, "NIGHTMILL_FILES_DIR")

    def coming(self, file_id: str) -> Path:
        """Where a content is written to."""
        return self._whole(file_id).with_suffix(_COMING)

    def settle(self, file_id: str) -> None:
        """Give a content its name: its row is there."""
        self.coming(file_id).rename(self._whole(file_id))

    def find(self, file_id: str) -> Path:
        """Where the content of a file is whose row is there."""
        whole, coming = self._whole(file_id), self.coming(file_id)
        # A server may have died between the two steps, or is between them just now.
        return coming if not whole.exists() and coming.exists() else whole

    def open(self, file_id: str) -> BinaryIO:
        """The content of a file whose row is there; raises FileNotFoundError."""
        try:
            return self._whole(file_id).open("rb")
        except FileNotFoundError:
            return self.find(file_id).open("rb")

    def remove(self, file_id: str) -> None:
        """Take a content away, whatever its name is."""
        for path in (self._whole(file_id), self.coming(file_id)):
            path.unlink(missing_ok=True)

    def sweep(self, known: Callable[[Iterable[str]], set[str]]) -> int:
        """Remove contents that never got a row; `known` says which ids have one. Returns how many."""
        before = time.time() - _FORGOTTEN_SECONDS
        old = {
            path.stem: path
            for path in self.path.glob(f"*{_COMING}")
            if is_job_id(path.stem) and path.stat().st_mtime < before
        }
        forgotten = old.keys() - known(old)
        for file_id in forgotten:
            old[file_id].unlink(missing_ok=True)
        return len(forgotten)

    def _whole(self, file_id: str) -> Path:
        if not is_job_id(file_id):
            raise ValueError("a content is named by an id that was drawn here")
        return self.path / file_id


def wait_for_disk(path: Path) -> None:
    """Wait until a file that was closed is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
