"""The folder with the contents of files, named by the ids of their rows in SQL.

Content has a temporary name until its row exists. So after a server's death, content without a row always has
such a name, and is removed when it is a day old.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.base.settings import make_data_dir

_COMING = ".coming"
_FORGOTTEN_SECONDS = 86_400.0  # longer than anything takes to come


class Folder:
    """The contents of files. Several servers may share one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_data_dir(path, "NIGHTMILL_FILES_DIR")

    def coming(self, file_id: str) -> Path:
        """Return the temporary path of content."""
        return self._whole(file_id).with_suffix(_COMING)

    def settle(self, file_id: str) -> None:
        """Rename content after its row was inserted."""
        self.coming(file_id).rename(self._whole(file_id))

    def find(self, file_id: str) -> Path:
        """Return the path of content whose row exists."""
        whole, coming = self._whole(file_id), self.coming(file_id)
        # A server may have died between inserting and renaming, or is between them now.
        return coming if not whole.exists() and coming.exists() else whole

    def open(self, file_id: str) -> BinaryIO:
        """Open content whose row exists; raises FileNotFoundError."""
        try:
            return self._whole(file_id).open("rb")
        except FileNotFoundError:
            return self.find(file_id).open("rb")

    def remove(self, file_id: str) -> None:
        """Remove content under either name."""
        for path in (self._whole(file_id), self.coming(file_id)):
            path.unlink(missing_ok=True)

    def sweep(self, known: Callable[[Iterable[str]], set[str]]) -> int:
        """Remove content that never got a row; `known` filters ids to those with a row. Returns the number
        removed."""
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
    """Sync a closed file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
