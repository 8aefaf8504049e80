"""Shares out the time and the energy of one GPU among engines of several processes that compute on it.

A counter of energy is the GPU's, and tells no engines apart; two steps at once each take longer. So while N
engines have work, each is charged with 1/N of the time, and of what the counter grows by in that time. Time
in which none has work, and the energy of that, is charged to nobody. The sum of all accounts is therefore the
time in which any engine had work, and what the counter grew by meanwhile, from its first reading to its last.

The accounts are in memory that the processes share, under a lock of the system, which goes when its holder
does. An engine holds a second one for its account: who finds it free knows that the engine has died.
"""

import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Callable

from nightmill.worker.engine.metering import EnergyCounter

__all__ = ["MOST_ENGINES", "SharedGpu", "new_ledger"]

MOST_ENGINES = 32
"""Engines that may share one GPU."""
_HEAD = struct.Struct("=dd")  # up to when time is shared out, and the counter when it was last read, or NaN
_ACCOUNT = struct.Struct("=dddd")  # 1 while it has work; seconds; joules; seconds since the counter was read
_TABLE = struct.Struct(f"={4 * MOST_ENGINES}d")  # all accounts
_SIZE = _HEAD.size + _TABLE.size
_LOCK = struct.Struct("@hhqqi4x")  # the system's `struct flock`
_ALL = MOST_ENGINES  # the byte whose lock is the one for all accounts
_PATIENCE_SECONDS, _POLL_SECONDS = 0.2, 5e-5  # for the lock
_LOOK_SECONDS = 0.2  # between two looks whether the others live


def new_ledger() -> int:
    """Return a descriptor of empty accounts, for processes to inherit: they go with the last of these."""
    descriptor = os.memfd_create("nightmill-gpu")
    os.ftruncate(descriptor, _SIZE)
    os.pwrite(descriptor, _HEAD.pack(0.0, math.nan), 0)
    return descriptor


class SharedGpu:
    """One engine's account: how long it had the GPU to itself, so to say, and what energy that took.

    descriptor  of the accounts (`new_ledger`)
    counter     of the GPU's energy; None: it does not tell
    now         seconds of a clock that all processes share, as the system's monotonic one

    It counts as idle until `begin`. Raises OSError where the accounts cannot be used.
    """

    def __init__(
        self,
        descriptor: int,
        counter: EnergyCounter | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counter = counter
        self._now = now
        # A lock is an opening's, and those who inherit a descriptor share its opening.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._file, _SIZE)
        self._own = self._open_account()
        self._working = False
        self._waited_in_vain = False
        self._look_at = 0.0

    def begin(self) -> None:
        """It has work from now on."""
        self._working = True
        self._settle()

    def rest(self) -> None:
        """It has no work any more."""
        self._working = False
        self._settle()

    def clock(self) -> float:
        """Return its seconds so far: they pass while it has work, and the slower the more engines have."""
        self._settle()
        return self._account(self._own)[1]

    def joules(self) -> float | None:
        """Return its joules so far; None if the GPU does not tell."""
        found = None if self._counter is None else self._counter.joules()
        if found is None:
            return None
        self._settle(found)
        return self._account(self._own)[2]

    def close(self) -> None:
        """Give the account up."""
        self.rest()
        self._memory.close()
        os.close(self._file)

    # -- helpers ---------------------------------------------------------------------------------

    def _settle(self, found: float | None = None) -> None:
        """Share out the time until now, and, if it was read, what the counter has grown by; then say whether
        this engine has work.

        Where the lock cannot be had, as its holder is suspended, the next call does it for both.
        """
        if not self._lock_all():
            return
        try:
            (until, counted), now = self._head(), self._now()
            working = _TABLE.unpack_from(self._memory, _HEAD.size)[::4]
            busy = [number for number, works in enumerate(working) if works]
            if len(busy) > 1 and now >= self._look_at:
                busy = [number for number in busy if self._lives(number)]
                self._look_at = now + _LOOK_SECONDS
            for number in busy:
                works, seconds, joules, unread = self._account(number)
                each = max(0.0, now - until) / len(busy)
                self._write(number, works, seconds + each, joules, unread + each)
            _HEAD.pack_into(self._memory, 0, max(until, now), counted)
            if self._working and not busy and self._counter is not None:
                self._forget(self._counter.joules())  # what was consumed since was nobody's work
            elif found is not None:
                self._share_out(found)
            self._write(self._own, float(self._working), *self._account(self._own)[1:])
        finally:
            self._lock(_ALL, fcntl.F_UNLCK)

    def _lock_all(self) -> bool:
        give_up_at = time.monotonic() + (0.0 if self._waited_in_vain else _PATIENCE_SECONDS)
        while not self._lock(_ALL, fcntl.F_WRLCK):
            if time.monotonic() >= give_up_at:
                self._waited_in_vain = True
                return False
            time.sleep(_POLL_SECONDS)
        self._waited_in_vain = False
        return True

    def _share_out(self, found: float) -> None:
        """Add what the counter has grown by to the accounts, by their time since it was last read."""
        until, counted = self._head()
        grown = 0.0 if math.isnan(counted) else max(0.0, found - counted)
        accounts = {number: self._account(number) for number in range(MOST_ENGINES)}
        whole = sum(unread for *_, unread in accounts.values())
        for number, (working, seconds, joules, unread) in accounts.items():
            if unread > 0.0:
                self._write(number, working, seconds, joules + grown * unread / whole, 0.0)
        _HEAD.pack_into(self._memory, 0, until, found if math.isnan(counted) else max(found, counted))

    def _forget(self, found: float | None) -> None:
        """Begin anew at what the counter says: what was not shared out never is."""
        until, counted = self._head()
        _HEAD.pack_into(self._memory, 0, until, counted if found is None else found)
        for number in range(MOST_ENGINES):
            self._write(number, *self._account(number)[:3], 0.0)

    def _lives(self, number: int) -> bool:
        """Return whether an account's engine lives; one that has died has no work any more."""
        if number == self._own or not self._lock(number, fcntl.F_WRLCK):
            return True
        self._lock(number, fcntl.F_UNLCK)
        self._write(number, 0.0, *self._account(number)[1:])
        return False

    def _open_account(self) -> int:
        for number in range(MOST_ENGINES):
            if self._lock(number, fcntl.F_WRLCK):
                self._write(number, 0.0, 0.0, 0.0, 0.0)
                return number
        raise OSError(f"{MOST_ENGINES} engines share the GPU already")

    def _head(self) -> tuple[float, float]:
        until, counted = _HEAD.unpack_from(self._memory, 0)
        return until, counted

    def _account(self, number: int) -> tuple[float, float, float, float]:
        working, seconds, joules, unread = _ACCOUNT.unpack_from(self._memory, _place(number))
        return working, seconds, joules, unread

    def _write(self, number: int, *account: float) -> None:
        _ACCOUNT.pack_into(self._memory, _place(number), *account)

    def _lock(self, byte: int, kind: int) -> bool:
        """Lock or unlock a byte; returns False where somebody else has it."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


def _place(number: int) -> int:
    return _HEAD.size + number * _ACCOUNT.size
