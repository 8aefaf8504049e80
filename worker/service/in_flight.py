"""The jobs that a worker has claimed, and its room for more; shared by its threads, behind one lock."""

import threading
from collections.abc import Callable, Sequence

from nightmill.jobs.sql.claims import Claim

JobKey = tuple[str, int]  # job id, attempt


class _Countdown:
    """Lets one thread sleep until it was released so many times; releases are under one lock."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._over = threading.Event()
        if not left:
            self._over.set()

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            self._over.set()

    def wait(self) -> None:
        self._over.wait()


class InFlight:
    """The claimed jobs of this worker, and how many more it may claim.

    Claiming only what the engine can soon take leaves the rest of a queue to other workers. Jobs that were
    claimed when it was too late go to `hand_back`.
    """

    def __init__(
        self, capacity: int, hand_back: Callable[[Sequence[JobKey]], None] = lambda keys: None
    ) -> None:
        self.capacity = capacity
        self._hand_back = hand_back
        self._changed = threading.Condition()
        self._reserved = 0
        self._jobs: dict[JobKey, str] = {}  # with the fingerprint of its prompt, once that is known
        self._awaited: dict[JobKey, list[_Countdown]] = {}
        self._closed = False
        self._ended = False
        self._paused = False

    def reserve(self, wanted: int) -> int:
        """Wait for room and take up to `wanted` places; 0 once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.room > 0)
            if self._closed:
                return 0
            taken = min(wanted, self.room)
            self._reserved += taken
            return taken

    def fill(self, reserved: int, claims: Sequence[Claim]) -> bool:
        """Turn reserved places into claimed jobs; the places of jobs that could not be claimed are free.

        False if it is too late: then the jobs have been handed back.
        """
        keys = [(claim.job_id, claim.attempt) for claim in claims]
        with self._changed:
            ours = not self._ended
            if ours:
                self._jobs.update(dict.fromkeys(keys, ""))
        try:
            if not ours:
                self._hand_back(keys)
        finally:
            with self._changed:
                self._reserved -= reserved
                self._changed.notify_all()
        return ours

    def mark(self, key: JobKey, fingerprint: str) -> None:
        """Note what saved tokens of a job depend on."""
        with self._changed:
            if key in self._jobs:
                self._jobs[key] = fingerprint

    def fingerprint(self, key: JobKey) -> str:
        """What `mark` noted; empty if the job is not in flight."""
        with self._changed:
            return self._jobs.get(key, "")

    def remove(self, keys: Sequence[JobKey]) -> None:
        """These jobs are not this worker's any more."""
        with self._changed:
            for key in keys:
                self._jobs.pop(key, None)
                for waiting in self._awaited.pop(key, ()):
                    waiting.release()
            self._changed.notify_all()

    def wait_for_end(self, keys: Sequence[JobKey]) -> None:
        """Return when none of `keys` is in flight.

        One shard's thread wakes for its own jobs only: `_changed` would wake dozens of them at every result.
        """
        with self._changed:
            left = self._jobs.keys() & keys
            ended = _Countdown(len(left))
            for key in left:
                self._awaited.setdefault(key, []).append(ended)
        ended.wait()

    def pause(self, *, even_if_busy: bool = True) -> bool:
        """Let nobody `reserve` until `resume`. Unless `even_if_busy`: False, if jobs are in flight."""
        with self._changed:
            if not even_if_busy and not self.idle:
                return False
            self._paused = True
            return True

    def resume(self) -> None:
        """The end of a pause, if there is one."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def reserve_all(self, timeout: float) -> int:
        """In a pause, take every place once nothing is in flight; 0 after `timeout`, or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.idle, timeout)
            if self._closed or not self.idle:
                return 0
            self._reserved = self.capacity
            return self.capacity

    @property
    def closed(self) -> bool:
        """True once nobody may reserve any more."""
        return self._closed

    def close(self) -> None:
        """Let nobody reserve any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> list[JobKey]:
        """Take no claimed job any more; returns those that are in flight for good."""
        with self._changed:
            self._closed = self._ended = True
            self._changed.notify_all()
            return list(self._jobs)

    def wait_for_claims(self, seconds: float) -> bool:
        """Return when no claim is under way any more; False if one still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reserved == 0, seconds)

    @property
    def idle(self) -> bool:
        """True if no job is in flight and no claim under way."""
        with self._changed:
            return self._reserved == 0 and not self._jobs

    def keys(self) -> list[JobKey]:
        """The jobs now in flight."""
        with self._changed:
            return list(self._jobs)

    @property
    def room(self) -> int:
        """Places that are neither filled nor reserved; none in a pause."""
        return 0 if self._paused else self.capacity - self._reserved - len(self._jobs)
