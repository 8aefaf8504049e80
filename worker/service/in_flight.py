"""The jobs that a worker has claimed, and its room for more; shared by its threads, behind one lock."""

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.sql.claims import Claim

JobKey = tuple[str, int]  # job id, attempt


class Noted(NamedTuple):
    """Notes on a job in flight; empty and None if it is not in flight."""

    fingerprint: str = ""
    markup: Markup | None = None
    prompt_digest: str | None = None


NOTHING = Noted()
MOST_UNWRITTEN = 256
"""Answered jobs that take no places, at most: what a commit takes until it is over, at 4,000 rows/s."""
_CLAIMED_TOGETHER = 64  # places that become free before who waits for some is woken: a claim costs by itself


class ClaimMode(Enum):
    """Which jobs a worker claims at the moment."""

    ALL = "all"
    INTERACTIVE = "interactive"
    NONE = "none"


class Countdown:
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

    def wait(self, seconds: float | None = None) -> bool:
        """Return True once all are released; False after so many seconds."""
        return self._over.wait(seconds)


class InFlight:
    """The claimed jobs of this worker, and how many more it may claim.

    Claiming only what the engine can soon take leaves the rest of a queue to other workers. Jobs that were
    claimed when it was too late go to `hand_back`. A job takes a place for each of its answers that has not
    ended, but never more than half of all: there is room beside it for jobs with one.

    A job that is answered keeps no place while it waits to be written, since the engine could take another
    meanwhile: short answers come faster than commits.

    Beside `capacity` slots for all there are `reserved_slots` more for interactive jobs only. These take
    theirs first, and where they are full any other, before whoever else waits for one.
    """

    def __init__(
        self,
        capacity: int,
        hand_back: Callable[[Sequence[JobKey]], None] = lambda keys: None,
        *,
        reserved_slots: int = 0,
    ) -> None:
        self.capacity = capacity
        self.reserved_slots = reserved_slots
        self._hand_back = hand_back
        self._changed = threading.Condition()
        self._reserved = {False: 0, True: 0}  # for interactive jobs and others
        self._interactive: set[JobKey] = set()
        self._urgent = False  # an interactive job waits for a place
        self._jobs: dict[JobKey, Noted] = {}
        self._further: dict[JobKey, int] = {}  # places beyond the first, of jobs with several answers
        self._answered: set[JobKey] = set()  # those that wait to be written
        self._freed = 0  # places since anybody was woken
        self._awaited: dict[JobKey, list[Countdown]] = {}
        self._closed = False
        self._ended = False
        self._claim_mode = ClaimMode.ALL
        self._yields = False  # to more urgent jobs of another model on the same GPU

    def resize(self, capacity: int, reserved_slots: int) -> None:
        """Have so many slots from now on, as an engine has said that it has; before any is taken."""
        with self._changed:
            self.capacity, self.reserved_slots = capacity, reserved_slots

    def reserve(self, wanted: int, *, interactive: bool = False) -> int:
        """Wait for room and take up to `wanted` places; 0 once closed."""
        with self._changed:
            if not self._wait_for_room(interactive):
                return 0
            taken = min(wanted, self.room_for(interactive))
            self._reserved[interactive] += taken
            return taken

    def _wait_for_room(self, interactive: bool) -> bool:
        """False once closed. One thread at a time asks for interactive jobs."""
        if not interactive:
            self._changed.wait_for(lambda: self._closed or (self.room > 0 and not self._urgent))
        elif not self._closed and self.room_for(True) <= 0:
            self._urgent = True
            self._changed.wait_for(lambda: self._closed or self.room_for(True) > 0)
        return not self._closed

    def wait_for_room(self, seconds: float, *, urgent: bool = False) -> int:
        """Places that interactive jobs may take, once there are any; 0 after so long.

        urgent: such jobs are there, so until the next call nobody else is given one
        """
        with self._changed:
            if self._urgent and not urgent:
                self._changed.notify_all()
            self._urgent = urgent
            self._changed.wait_for(lambda: self._closed or self.room_for(True) > 0, seconds)
            return 0 if self._closed else max(0, self.room_for(True))

    @property
    def most(self) -> int:
        """Slots that a job takes at most, however many answers it has: there is room beside it."""
        return max(1, self.capacity // 2)

    def _places(self, answers: int) -> int:
        return max(1, min(answers, self.most))

    def fill(self, reserved: int, claims: Sequence[Claim], *, interactive: bool = False) -> bool:
        """Turn reserved places into claimed jobs; the places of jobs that could not be claimed are free.

        False if it is too late: then the jobs have been handed back.
        """
        keys = [(claim.job_id, claim.attempt) for claim in claims]
        with self._changed:
            ours = not self._ended
            if ours:
                self._jobs.update(dict.fromkeys(keys, NOTHING))
                if interactive:
                    self._interactive.update(keys)
                for key, claim in zip(keys, claims, strict=True):
                    if claim.params.answers > 1:
                        self._further[key] = self._places(claim.params.answers) - 1
        try:
            if not ours:
                self._hand_back(keys)
        finally:
            with self._changed:
                self._reserved[interactive] -= reserved
                self._changed.notify_all()
        return ours

    def set_unfinished(self, key: JobKey, answers: int) -> None:
        """Shrink the job's reservation to its unfinished answers."""
        with self._changed:
            further = self._places(answers) - 1
            if self._further.get(key, 0) > further:
                self._further[key] = further
                self._changed.notify_all()

    def answered(self, key: JobKey) -> None:
        """The job has its answers, and waits to be written."""
        with self._changed:
            if key not in self._jobs:
                return
            self._answered.add(key)
            self._further.pop(key, None)
            self._freed += 1
            if self._freed >= min(_CLAIMED_TOGETHER, max(1, self.capacity // 4)):
                self._freed = 0
                self._changed.notify_all()

    def mark(
        self, key: JobKey, fingerprint: str, markup: Markup | None = None, prompt_digest: str | None = None
    ) -> None:
        """Note what saved tokens of a job depend on, what its texts hold, and which tokens its prompt has."""
        with self._changed:
            if key in self._jobs:
                self._jobs[key] = Noted(fingerprint, markup, prompt_digest)

    def noted(self, key: JobKey) -> Noted:
        """Return all that `mark` noted of a job."""
        with self._changed:
            return self._jobs.get(key, NOTHING)

    def fingerprint(self, key: JobKey) -> str:
        """Return the fingerprint that `mark` noted; empty if the job is not in flight."""
        return self.noted(key).fingerprint

    def markup(self, key: JobKey) -> Markup | None:
        """Return the markup that `mark` noted; None if it noted none."""
        return self.noted(key).markup

    def prompt_digest(self, key: JobKey) -> str | None:
        """Return the digest of the prompt that `mark` noted; None if it noted none."""
        return self.noted(key).prompt_digest

    def remove(self, keys: Sequence[JobKey]) -> None:
        """These jobs are not this worker's any more."""
        with self._changed:
            for key in keys:
                self._jobs.pop(key, None)
                self._further.pop(key, None)
                self._interactive.discard(key)
                self._answered.discard(key)
                for waiting in self._awaited.pop(key, ()):
                    waiting.release()
            self._changed.notify_all()

    def wait_for_end(self, keys: Sequence[JobKey]) -> None:
        """Return when none of `keys` is in flight."""
        self.ending(keys).wait()

    def ending(self, keys: Sequence[JobKey]) -> Countdown:
        """Return a countdown to wait on for the end of these jobs.

        One shard's thread wakes for its own jobs only: `_changed` would wake dozens of them at every result.
        """
        with self._changed:
            left = self._jobs.keys() & keys
            ended = Countdown(len(left))
            for key in left:
                self._awaited.setdefault(key, []).append(ended)
        return ended

    def pause(self, *, interactive: bool = False) -> None:
        """Let nobody `reserve` until `resume`; `interactive`: nobody but for interactive jobs."""
        with self._changed:
            self._claim_mode = ClaimMode.INTERACTIVE if interactive else ClaimMode.NONE
            self._changed.notify_all()

    def pause_if_idle(self) -> bool:
        """Pause and return True if nothing is in flight; else return False, and nothing changes."""
        with self._changed:
            if not self.idle:
                return False
            self._claim_mode = ClaimMode.NONE
            return True

    def resume(self) -> None:
        """The end of a pause, if there is one."""
        with self._changed:
            self._claim_mode = ClaimMode.ALL
            self._changed.notify_all()

    @property
    def yields(self) -> bool:
        """True while only interactive jobs are claimed, as more urgent ones wait for another model."""
        return self._yields

    def set_yields(self, yields: bool) -> None:
        """Claim only interactive jobs, or all again; a pause is not touched."""
        with self._changed:
            if self._yields != yields:
                self._yields = yields
                self._changed.notify_all()

    def wait_until_quiet(self, seconds: float) -> bool:
        """Return True once nothing is in flight and no interactive job waits, or nobody may reserve any more.

        False after so many seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or (self.idle and not self._urgent), seconds)

    def reserve_all(self, timeout: float) -> int:
        """Pause, and take every place, once nothing is in flight; 0 after `timeout`, or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.idle, timeout)
            if self._closed or not self.idle:
                return 0
            self._claim_mode = ClaimMode.NONE
            self._reserved[False] = self.capacity
            return self.capacity

    @property
    def urgent(self) -> bool:
        """True if interactive jobs wait for a place on this worker."""
        return self._urgent

    @property
    def interactive_alone(self) -> bool:
        """True if whatever is in flight, or is being claimed, is interactive."""
        with self._changed:
            return not self._reserved[False] and self._interactive.issuperset(self._jobs)

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
            return self._changed.wait_for(lambda: not any(self._reserved.values()), seconds)

    @property
    def idle(self) -> bool:
        """True if no job is in flight and no claim under way."""
        with self._changed:
            return not self._jobs and not any(self._reserved.values())

    def keys(self) -> list[JobKey]:
        """The jobs now in flight."""
        with self._changed:
            return list(self._jobs)

    @property
    def room(self) -> int:
        """Places that are neither filled nor reserved; none in a pause. Negative if jobs took more."""
        return self.room_for(False)

    def room_for(self, interactive: bool) -> int:
        """Count the places neither filled nor reserved, for interactive jobs or for others; none in a pause.

        For others the count is negative if jobs took more.
        """
        if self._claim_mode is ClaimMode.NONE:
            return 0
        if not interactive and (self._yields or self._claim_mode is ClaimMode.INTERACTIVE):
            return 0
        interactive_taken = self._reserved[True] + len(self._interactive - self._answered)
        interactive_taken += sum(self._further.get(key, 0) for key in self._interactive)
        taken = sum(self._reserved.values()) + len(self._jobs) + sum(self._further.values())
        taken -= min(len(self._answered), MOST_UNWRITTEN)
        room = self.capacity - (taken - interactive_taken) - max(0, interactive_taken - self.reserved_slots)
        return max(0, room) + max(0, self.reserved_slots - interactive_taken) if interactive else room
