"""Work on a batch between requests, in small steps: what a server may put aside to see to another batch."""

from collections.abc import Generator
from dataclasses import dataclass

from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus

Steps = Generator[bool, None, None]
"""Yields between two steps: whether rows are there by now that were not there when the work began."""


class OvertakenError(Exception):
    """The batch is another's now, or was cancelled."""


class PostponedError(Exception):
    """The batch cannot go on just now, which is not its fault. The message is for its owner."""


@dataclass(slots=True)
class Work:
    """What this server does for one batch in the status that it was seen in."""

    batch: HttpBatch
    steps: Steps
    died: int = 0  # attempts to read the file before this one that a server did not survive

    @property
    def reads(self) -> bool:
        """Whether it reads a file; else it writes results."""
        return self.batch.status is HttpStatus.VALIDATING
