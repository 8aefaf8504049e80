"""Work on a batch in small steps, which a server can suspend to serve another batch."""

import contextvars
from collections.abc import Generator
from dataclasses import dataclass, field

from nightmill.jobs.server.running import Running
from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus

Steps = Generator[bool, None, None]
"""Yields between steps: True once rows were entered since the work began."""


class OvertakenError(Exception):
    """Another server has taken the batch, or it was cancelled."""


class PostponedError(Exception):
    """The batch is delayed, through no fault of its own. The message is for its owner."""


@dataclass(slots=True)
class Work:
    """This server's work on one batch in the status seen before."""

    batch: HttpBatch
    steps: Steps
    died: int = 0  # earlier attempts to read the file that killed a server
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # shared by all slices

    @property
    def reads(self) -> bool:
        """True if it reads a file; otherwise it writes results."""
        return self.batch.status is HttpStatus.VALIDATING


@dataclass(slots=True)
class Away:
    """Work whose slice hangs in its files."""

    work: Work
    running: Running[tuple[bool, bool]]  # (done, whether rows were entered)
    since: float  # by `time.monotonic`
    released: bool = False  # the lease is released, so a later result is ignored
