"""A small disk of a night's own, which can be filled: a tmpfs, where this user may mount one."""

import errno
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

SIZE_MIB = 96
NO_DISK = "full disks that this user may not have (no tmpfs can be mounted)"
"""A line of the table."""
_BLOCK = bytes(1 << 16)


class Disk:
    """The folder `path`; `mounted` says whether it is a disk of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mounted = False
        self._ballast = path / "ballast"

    def fill(self) -> bool:
        """Take all that is left; False where there is no such disk."""
        if not self.mounted:
            return False
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while file.write(_BLOCK):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        return True

    def free(self) -> None:
        """Give it back."""
        self._ballast.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.path.mkdir()
        command = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={SIZE_MIB}m,mode=700",
            "nightmill-campaign",
            self.path,
        ]
        with suppress(FileNotFoundError):
            self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *exc: object) -> None:
        if self.mounted:
            self.free()
            kept = self.path.with_name(f"{self.path.name}-kept")  # for a closer look
            subprocess.run(["cp", "--archive", self.path, kept], check=False)
            subprocess.run(["umount", "--lazy", self.path], capture_output=True, check=False)
