"""What a server does for batches between requests: enters their rows, waits for them, writes their results.

Any server does the next step of any batch. Each step can be done again: rows are entered once however often
their file is read, and a result file counts from the moment when its row and the end of its batch are
committed together. So a server that dies loses nothing, and another goes on where its claim has run out.

One thread does all of it, in rounds. In each, every owner of batches has the same short time, whatever they
have handed in: what takes longer is put aside, with its open file, until the next round.
"""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from nightmill.jobs.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError, InvalidTransitionError, NightmillError
from nightmill.jobs.ids import IdSource
from nightmill.jobs.server.finishing import Finisher
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.validating import Validator
from nightmill.jobs.server.working import OvertakenError, PostponedError, Work
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from nightmill.jobs.sql.jobs import GROUP
from nightmill.jobs.sql.patience import until
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.webhooks import WebhookStore

log = logging.getLogger("nightmill.server")

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # for the step under way, and for giving claims back, when the server ends
_AGAIN_SECONDS = 15.0  # after a step that failed
_SLICE_SECONDS = 0.25  # of one owner in each round
_MOST_KEPT = 8  # files that are read, and as many batches whose results are written, between rounds
_MOST_DEATHS = 3  # of servers over one file, without a new row
_SWEEP_SECONDS = 5.0  # as a worker's heartbeat
_SWEEP_GROUPS = 4  # of jobs that are expired between two rounds
_FORGET_SECONDS = 3600.0  # between two looks for what need not be kept
_ORPHANED = timedelta(days=1)  # webhooks of batches that are gone


class Keeper:
    """Works on batches of one database, on a thread of its own, beside those of other servers."""

    def __init__(self, client: Client, folder: Folder, keep_files: timedelta | None = None) -> None:
        self._client = client
        self._folder = folder
        self._files = FileStore(client.database)
        self._store = HttpBatchStore(client.database)
        self._rows = client.batches.store
        self._webhooks = WebhookStore(client.database)
        self._sweep = Sweep(client.database)
        self._name = IdSource().draw()
        self._validator = Validator(client, folder, self._name)
        self._finisher = Finisher(client, folder, self._name)
        self._keep_files = keep_files
        self._silence = timedelta(seconds=client.settings.stale_seconds)  # as a worker's
        self._over = threading.Event()
        self._bell = threading.Event()
        self._works: dict[str, Work] = {}  # what was put aside, by the id of the batch
        self._sliced: dict[str, float] = {}  # when the time of a batch was up that is not through
        self._served: dict[str | None, float] = {}  # when an owner's time was up
        self._not_before: dict[str, float] = {}
        self._died: dict[str, int] = {}  # attempts at a batch that servers did not survive, as counted last
        self._sweep_at = self._forget_at = 0.0
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now: there is something to do."""
        self._bell.set()

    def stop(self) -> None:
        """End after the step that is under way, which is broken off; returns in bounded time."""
        self._over.set()
        self._bell.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():  # it waits for a database or a disk that hangs
            log.warning("the step of a batch does not end; another server takes it up when its claim ends")
            return
        with until(time.monotonic() + _END_SECONDS), suppress(NightmillError):  # the claims run out
            self._store.let_go(self._name)

    def look(self) -> None:
        """A round: what is quick for every batch that needs it, then some time for each owner."""
        over, batches = self._store.over(), self._store.open()
        self._forget_ended(batches)
        self._end_what_nobody_ends(batches)
        turns: dict[str | None, list[HttpBatch]] = {}
        for batch in batches:
            if batch.status is not HttpStatus.IN_PROGRESS:
                turns.setdefault(batch.owner, []).append(batch)
            elif batch.id in over and self._store.finalize(batch):  # its rows have ended
                self.wake()
        self._served = {owner: self._served.get(owner, 0.0) for owner in turns}
        for owner in sorted(turns, key=self._served.__getitem__):
            self._turn(turns[owner])
            self._served[owner] = time.monotonic()
        if self._works:
            self.wake()

    def _run(self) -> None:
        while not self._over.is_set():
            pause = _AGAIN_SECONDS
            try:
                self.look()
                if time.monotonic() >= self._forget_at:
                    self._forget_at = time.monotonic() + _FORGET_SECONDS
                    self.forget()
                pause = _LOOK_SECONDS
            except NightmillError as error:  # the database is away
                log.warning("%s", error)
            except Exception:  # a mistake of ours: an end of this thread would end all batches
                log.exception("looking for batches failed; it is tried again")
            self._bell.wait(pause)
            self._bell.clear()
        for batch_id in list(self._works):
            self._drop(batch_id)

    # -- the time of one owner -------------------------------------------------------------------

    def _turn(self, batches: Iterable[HttpBatch]) -> None:
        """Work on the batches of one owner until the time is up, first on what is new."""
        end = time.monotonic() + _SLICE_SECONDS
        for batch in sorted(batches, key=self._place):
            if self._over.is_set():
                return
            if not self._may_work_on(batch):
                continue
            try:
                self._work_on(batch, end)
            except OvertakenError:
                self._overtaken(batch)
            if time.monotonic() >= end:
                self.wake()
                return

    def _place(self, batch: HttpBatch) -> tuple[float, bool, str]:
        return self._sliced.get(batch.id, 0.0), batch.status is HttpStatus.VALIDATING, batch.id

    def _may_work_on(self, batch: HttpBatch) -> bool:
        """Whether it is time to, and no other batch of its owner has the file open that this one would need.

        Whatever is through in the time of one round needs none.
        """
        if (work := self._works.get(batch.id)) is not None and work.batch.status is not batch.status:
            self._drop(batch.id)  # as when it was cancelled: what comes now is new
        if time.monotonic() < self._not_before.get(batch.id, 0.0):
            return False
        return batch.id in self._works or batch.id not in self._sliced or self._may_keep(batch)

    def _may_keep(self, batch: HttpBatch) -> bool:
        """Whether the work on a batch may be kept open between rounds."""
        reads = batch.status is HttpStatus.VALIDATING
        kept = [work.batch for work in self._works.values() if work.reads is reads]
        others = [one for one in kept if one.id != batch.id]
        return len(others) < _MOST_KEPT and all(one.owner != batch.owner for one in others)

    def _work_on(self, batch: HttpBatch, end: float) -> None:
        """Go on with a batch until it is through or the time is up; raises OvertakenError."""
        work = self._begin_or_resume(batch)
        if work is None:
            return
        progress = False
        try:
            for progress in work.steps:
                if self._over.is_set() or time.monotonic() >= end:
                    self._put_aside(work, died=0 if progress else work.died)
                    return
        except (OvertakenError, DatabaseUnreachableError):
            self._drop(batch.id)
            raise
        except PostponedError as error:
            log.error("batch %s: %s", batch.batch, error)
            self._postpone(work, note=f"{error}; the server tries again every {_AGAIN_SECONDS:.0f} s")
        except MemoryError:  # an attempt that a server with less memory would not have survived
            log.exception("batch %s: a step took too much memory", batch.batch)
            self._postpone(work, attempts=work.died + work.reads)
        except Exception:  # a mistake of ours, which its owner cannot mend: the other batches go on
            log.exception("batch %s: a step failed; it is tried again", batch.batch)
            self._postpone(work)
        else:
            self._drop(batch.id)
            if work.reads:
                self.wake()  # its rows may have ended already

    def _begin_or_resume(self, batch: HttpBatch) -> Work | None:
        """The claimed work on a batch; None if another server has it, or nothing is left to do."""
        work = self._works.get(batch.id)
        if work is not None:
            counted = {"attempts": work.died + 1} if work.reads else {}
            if not self._store.hold(batch, self._name, self._silence, note=None, **counted):
                raise OvertakenError
            return work
        if batch.status is not HttpStatus.VALIDATING:
            claimed = self._store.claim(batch, self._name, self._silence)
            work = Work(batch, self._finisher.steps(batch)) if claimed else None
        elif (died := self._attempt(batch)) is not None:
            if died >= _MOST_DEATHS:
                self._validator.give_up(batch, died)
                self.wake()
                return None
            work = Work(batch, self._validator.steps(batch), died)
        if work is not None:
            self._works[batch.id] = work
        return work

    def _attempt(self, batch: HttpBatch) -> int | None:
        """Count an attempt to read its file; returns how many before it a server did not survive."""
        died = self._store.attempt(batch, self._name, self._silence, self._died.get(batch.id, 0))
        if died is not None:
            self._died[batch.id] = died
        return died

    def _put_aside(self, work: Work, died: int) -> None:
        """Its time is up: keep it for the next round, or close it if there is no place for it."""
        batch = work.batch
        work.died = self._died[batch.id] = died
        counted = {"attempts": died} if work.reads else {}
        self._sliced[batch.id] = time.monotonic()
        if not self._may_keep(batch):
            self._close(self._works.pop(batch.id))
            self._store.release(batch, self._name, **counted)  # another server may have the place
        elif counted and not self._store.hold(batch, self._name, self._silence, **counted):
            raise OvertakenError

    def _postpone(self, work: Work, attempts: int | None = None, note: str | None = None) -> None:
        batch = work.batch
        self._drop(batch.id)
        self._sliced[batch.id] = time.monotonic()  # others of its owner go first
        self._not_before[batch.id] = time.monotonic() + _AGAIN_SECONDS
        counted = {"attempts": work.died if attempts is None else attempts} if work.reads else {}
        self._store.release(batch, self._name, note=note, **counted)

    def _drop(self, batch_id: str) -> None:
        """Nothing of the work on a batch is kept."""
        self._sliced.pop(batch_id, None)
        if (work := self._works.pop(batch_id, None)) is not None:
            self._close(work)

    def _close(self, work: Work) -> None:
        try:
            work.steps.close()
        except OSError as error:  # of a folder that fails: what stays there is swept in a day
            log.error("batch %s: a file cannot be closed: %s", work.batch.batch, error)

    def _overtaken(self, batch: HttpBatch) -> None:
        self._drop(batch.id)
        now = self._store.get(batch.id)
        ended_without = now is not None and now.status.final and now.status is not HttpStatus.COMPLETED
        if batch.status is HttpStatus.VALIDATING and ended_without:
            self._rows.cancel(batch.batch)  # those that this server entered after its claim was lost

    # -- in order --------------------------------------------------------------------------------

    def _forget_ended(self, batches: Iterable[HttpBatch]) -> None:
        """Forget what this server knew of batches that have ended meanwhile."""
        going = {batch.id for batch in batches}
        for batch_id in (
            self._works.keys() | self._sliced.keys() | self._not_before.keys() | self._died.keys()
        ):
            if batch_id not in going:
                self._drop(batch_id)
                self._not_before.pop(batch_id, None)
                self._died.pop(batch_id, None)

    def _end_what_nobody_ends(self, batches: Iterable[HttpBatch]) -> None:
        """Batches end in time and when they are cancelled, also if no worker lives that would see to it."""
        waiting = any(
            batch.cancelling_at is not None
            or batch.status is HttpStatus.FINALIZING
            or self._validator.is_late(batch)
            for batch in batches
        )
        if waiting and time.monotonic() >= self._sweep_at:
            self._sweep.rescue(self._silence)
            expired = self._sweep.expire(_SWEEP_GROUPS)
            more = expired >= _SWEEP_GROUPS * GROUP
            self._sweep_at = time.monotonic() + (0.0 if more else _SWEEP_SECONDS)
            if more:
                self.wake()

    def forget(self) -> None:
        """Delete files that were kept for long enough, batches that ended so long ago, and lost contents."""
        self._folder.sweep(self._files.known)
        self._webhooks.forget(self._client.database.now() - _ORPHANED)
        if self._keep_files is None:
            return
        before = self._client.database.now() - self._keep_files
        self._store.forget(before)
        for file_id in self._files.made_before(before):
            with suppress(InvalidTransitionError):  # a batch is being made of it
                self._files.delete(file_id, partial(self._folder.remove, file_id))
