"""Job ids: UUIDv7 as 32 hexadecimal digits, so that the order of ids is the order of enqueueing."""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import overload

from nightmill.jobs.base.forking import Forkable

_JOB_ID = re.compile(r"[0-9a-f]{32}")


def is_job_id(text: str) -> bool:
    """Return True if the text has the form of a job id."""
    return _JOB_ID.fullmatch(text) is not None


class IdSource(Forkable):
    """Draws strictly increasing UUIDv7 (RFC 9562): 48 bits of milliseconds, then random bits.

    Within a process, an id that would not exceed the last one is the last one plus one, so ids sort in the
    order they were drawn, even within a millisecond.
    """

    _VERSION_AND_VARIANT = (0x7 << 76) | (0b10 << 62)
    _RANDOM_MASK = (0xFFF << 64) | ((1 << 62) - 1)

    def __init__(self) -> None:
        self.after_fork_in_child()
        self.watch_forks()

    def after_fork_in_child(self) -> None:
        """Start over: parent and children that all counted on from one id would draw the same ones."""
        self._lock = threading.Lock()
        self._last = 0

    def draw(self) -> str:
        """Return the next id."""
        milliseconds = time.time_ns() // 1_000_000
        random = int.from_bytes(os.urandom(10)) & self._RANDOM_MASK
        fresh = (milliseconds << 80) | random
        with self._lock:
            # Counting happens in the random bits alone, so version and variant stay in place.
            self._last = max(fresh, self._next_after(self._last))
            return f"{self._last | self._VERSION_AND_VARIANT:032x}"

    def _next_after(self, value: int) -> int:
        low = (value & ((1 << 62) - 1)) + 1
        if low < (1 << 62):
            return value + 1
        middle = ((value >> 64) & 0xFFF) + 1
        if middle < (1 << 12):
            return ((value >> 80) << 80) | (middle << 64)
        return ((value >> 80) + 1) << 80


class JobIds(Sequence[str]):
    """A read-only sequence of job ids that takes 16 bytes each."""

    def __init__(self, ids: Sequence[str] = ()) -> None:
        self._bytes = bytearray()
        self.extend(ids)

    def extend(self, ids: Sequence[str]) -> None:
        """Append `ids`."""
        for job_id in ids:
            self._bytes += bytes.fromhex(job_id)

    def __len__(self) -> int:
        return len(self._bytes) // 16

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "JobIds": ...
    def __getitem__(self, index: int | slice) -> "str | JobIds":
        if isinstance(index, slice):
            return JobIds([self[i] for i in range(*index.indices(len(self)))])
        if not -len(self) <= index < len(self):
            raise IndexError("job id index out of range")
        start = (index % len(self)) * 16
        return self._bytes[start : start + 16].hex()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self._bytes), 16):
            yield self._bytes[start : start + 16].hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} job ids>"
