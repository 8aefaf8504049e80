"""What was acknowledged to callers, and what they set out to do: kept outside Nightmill, and fsynced.

A promise is a job id that `enqueue` returned. An intent is a call that may change jobs: noted before it is
made, since a call that fails may have been carried out all the same, and again when it has returned.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.campaign.texts import Answer


@dataclass
class Promise:
    """A job that must not get lost. `guilty`: it can only fail (a poison, a row that no worker can read)."""

    job_id: str
    answer: Answer | None = None  # None: any text will do
    guilty: bool = False
    free: bool = False  # it may end in any way
    batch: str | None = None
    deadline: float | None = None  # seconds since the epoch
    at: float = field(default_factory=time.time)


@dataclass
class Intent:
    """A call: cancel, retry, delete, prune. `target`: a job's id, a batch's name, or for prune a time.

    `leave`: a request that waited for a job whose id it never learned, and has ended without an answer.
    """

    what: str
    target: str
    began: float
    ended: float | None = None  # None: it failed, or is under way
    done: int | None = None  # how many rows it said it had changed


@dataclass
class Call:
    """A call, by a clock that only goes forward. `keeper`: the process that has to keep the limit."""

    what: str
    limit: float
    began: float
    ended: float | None = None  # an answer or a refusal came; None: neither
    keeper: str = "campaign"


class Ledger:
    """Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "ledger.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()
        self.promises: dict[str, Promise] = {}
        self.intents: list[Intent] = []
        self.calls: list[Call] = []

    @contextmanager
    def timing(self, what: str, limit: float, keeper: str = "campaign") -> Iterator[Call]:
        """Around a call that must have an answer or a refusal within `limit` seconds, whatever that is."""
        call = Call(what, limit, time.monotonic(), keeper=keeper)
        self.calls.append(call)  # one operation, which needs no lock
        try:
            yield call
        finally:
            call.ended = time.monotonic()

    def promised(self, *promises: Promise) -> None:
        """These ids were handed to the caller."""
        with self._lock:
            self.promises |= {promise.job_id: promise for promise in promises}
            self._write({"promised": [asdict(promise) for promise in promises]})

    @contextmanager
    def intending(self, what: str, target: str) -> Iterator[Intent]:
        """Around a call that changes jobs."""
        intent = Intent(what, target, time.time())
        with self._lock:
            self.intents.append(intent)
            self._write({"begins": asdict(intent)})
        yield intent
        with self._lock:
            intent.ended = time.time()
            self._write({"returned": asdict(intent)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
