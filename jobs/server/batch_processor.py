"""Background processing of HTTP batches: entering rows, waiting for them, writing results.

Any server may do the next step of any batch. Each step can be repeated: rows are entered once however often
their file is read, and a result file becomes valid when its row and the end of its batch are committed
together. So if a server dies, nothing is lost, and another continues when its lease has expired.

One thread works in rounds. In each, every owner of batches gets the same short time slice; longer work is
suspended, with its open file, until the next round. Files are read and written on threads that are abandoned
when a folder hangs, and checked again when they return.
"""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError, InvalidTransitionError, NightmillError
from nightmill.jobs.server.finishing import Finisher
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.running import Running
from nightmill.jobs.server.validating import Validator
from nightmill.jobs.server.working import Away, OvertakenError, PostponedError, Work
from nightmill.jobs.sql.files import FileStore
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus
from nightmill.jobs.sql.jobs import GROUP
from nightmill.jobs.sql.patience import until
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.webhooks import WebhookStore

log = logging.getLogger("nightmill.server")

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # for the current step, and for releasing leases, when the server ends
_AGAIN_SECONDS = 15.0  # after a step that failed
_SLICE_SECONDS = 0.25  # time slice of an owner in a round
_PATIENCE_SECONDS = 4.0  # for a slice to end; then the others continue without it
_SHORT_SECONDS = 1.0  # the same while another slice has not ended, either
_RELEASE_SECONDS = 60.0  # for a slice to return; then another server may take the batch
_MOST_AWAY = 16  # slices that have not returned
_MOST_KEPT = 8  # suspended files, and as many suspended writers of results
_MOST_DEATHS = 3  # deaths of servers while reading one file, without a new row
_SWEEP_SECONDS = 5.0  # like a worker's heartbeat
_SWEEP_GROUPS = 4  # groups of jobs expired between two rounds
_FORGET_SECONDS = 3600.0  # between deletions of old files and batches
_ORPHANED = timedelta(days=1)  # webhooks of batches that are gone


class BatchProcessor:
    """Processes batches of one database on a background thread, concurrently with other servers."""

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
        self._silence = timedelta(seconds=client.settings.stale_seconds)  # the same as for workers
        self._over = threading.Event()
        self._bell = threading.Event()
        self._works: dict[str, Work] = {}  # suspended work by batch id
        self._away: dict[tuple[str, HttpStatus], Away] = {}  # slices that hang in a folder
        self._forgetting: Running[None] | None = None
        self._sliced: dict[str, float] = {}  # end of the last slice of unfinished batches
        self._served: dict[str | None, float] = {}  # end of each owner's last slice
        self._not_before: dict[str, float] = {}
        self._died: dict[str, int] = {}  # fatal attempts by batch id, as counted last
        self._sweep_at = self._forget_at = 0.0
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Begin a round now."""
        self._bell.set()

    def stop(self) -> None:
        """Interrupt the current step and end the thread, in bounded time."""
        self._over.set()
        self._bell.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():  # it waits for a hanging database or disk
            log.warning("the step of a batch does not end; another server takes it up when its claim ends")
            return
        with until(time.monotonic() + _END_SECONDS), suppress(NightmillError):  # the leases expire anyway
            self._store.let_go(self._name)

    def look(self) -> None:
        """Run a round: quick steps for all batches, then a time slice for each owner."""
        over, batches = self._store.over(), self._store.open()
        for away in list(self._away.values()):
            self._look_after(away)
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
                if time.monotonic() >= self._forget_at and (not self._forgetting or self._forgetting.over):
                    self._forget_at = time.monotonic() + _FORGET_SECONDS
                    self._forgetting = Running(self._forget_logged, "forgetting")
                pause = _LOOK_SECONDS
            except NightmillError as error:  # the database is unreachable
                log.warning("%s", error)
            except Exception:  # a bug: the end of this thread would stop all batches
                log.exception("looking for batches failed; it is tried again")
            self._bell.wait(pause)
            self._bell.clear()
        for batch_id in list(self._works):
            self._drop(batch_id)

    # -- the time of one owner -------------------------------------------------------------------

    def _turn(self, batches: Iterable[HttpBatch]) -> None:
        """Work on the batches of one owner until its slice is over, new ones first."""
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
        """Return True if work on a batch may begin now: not delayed, and its owner has no other file open.

        Work that ends within one round needs no open file.
        """
        if (work := self._works.get(batch.id)) is not None and work.batch.status is not batch.status:
            self._drop(batch.id)  # for example cancelled: the next step is another
        if (batch.id, batch.status) in self._away or len(self._away) >= _MOST_AWAY:
            return False
        if time.monotonic() < self._not_before.get(batch.id, 0.0):
            return False
        return batch.id in self._works or batch.id not in self._sliced or self._may_keep(batch)

    def _may_keep(self, batch: HttpBatch) -> bool:
        """Return True if the work on a batch may stay open between rounds."""
        reads = batch.status is HttpStatus.VALIDATING
        kept = [work.batch for work in self._works.values() if work.reads is reads]
        others = [one for one in kept if one.id != batch.id]
        return len(others) < _MOST_KEPT and all(one.owner != batch.owner for one in others)

    def _work_on(self, batch: HttpBatch, end: float) -> None:
        """Continue a batch until it is done or the slice is over; raises OvertakenError."""
        work = self._begin_or_resume(batch)
        if work is None:
            return
        running = Running(partial(self._slice, work, end), "slice", work.context)
        patience = _SHORT_SECONDS if self._away else _PATIENCE_SECONDS
        seconds = max(0.0, end - time.monotonic()) + patience
        if running.wait(seconds):
            self._settle(work, running)
            return
        self._works.pop(batch.id, None)
        self._away[batch.id, batch.status] = Away(work, running, time.monotonic())
        log.warning("batch %s: its files have not answered for %.0f s; others go on", batch.batch, seconds)

    def _slice(self, work: Work, end: float) -> tuple[bool, bool]:
        """Run steps until the work is done or the slice is over; returns (done, whether rows were
        entered)."""
        progress = False
        for progress in work.steps:
            if self._over.is_set() or time.monotonic() >= end:
                return False, progress
        return True, progress

    def _settle(self, work: Work, running: Running[tuple[bool, bool]]) -> None:
        """Handle the result of a slice; raises OvertakenError."""
        batch = work.batch
        try:
            through, progress = running.outcome()
            if not through:
                self._put_aside(work, died=0 if progress else work.died)
                return
        except (OvertakenError, DatabaseUnreachableError):
            self._drop(batch.id)
            raise
        except PostponedError as error:
            log.error("batch %s: %s", batch.batch, error)
            self._postpone(work, note=f"{error}; the server tries again every {_AGAIN_SECONDS:.0f} s")
        except MemoryError:  # counts as an attempt that killed a server
            log.exception("batch %s: a step took too much memory", batch.batch)
            self._postpone(work, attempts=work.died + work.reads)
        except Exception:  # a bug, which the owner cannot fix: the other batches continue
            log.exception("batch %s: a step failed; it is tried again", batch.batch)
            self._postpone(work)
        else:
            self._drop(batch.id)
            if work.reads:
                self.wake()  # its rows may have ended already

    def _look_after(self, away: Away) -> None:
        """Renew the lease of work whose slice hangs, for a while; resume it if the slice has returned."""
        work, batch = away.work, away.work.batch
        try:
            if away.running.over:
                del self._away[batch.id, batch.status]
                if away.released or batch.id in self._works:  # lost to another server, or cancelled meanwhile
                    self._close(work)
                    return
                self._works[batch.id] = work
                self._settle(work, away.running)
            elif not away.released:
                gone = time.monotonic() - away.since
                note = f"its files have not answered for {gone:.0f} s; the server waits for them"
                if gone < _RELEASE_SECONDS:
                    away.released = not self._store.hold(batch, self._name, self._silence, note=note)
                    return
                counted = {"attempts": work.died} if work.reads else {}  # no server has died of it
                self._store.release(batch, self._name, note=note, **counted)
                away.released = True
        except OvertakenError:
            self._overtaken(batch)

    def _begin_or_resume(self, batch: HttpBatch) -> Work | None:
        """Return the work on a batch with its lease; None if another server has it or nothing is left to
        do."""
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
        """Count an attempt to read its file; returns the number of earlier fatal attempts."""
        died = self._store.attempt(batch, self._name, self._silence, self._died.get(batch.id, 0))
        if died is not None:
            self._died[batch.id] = died
        return died

    def _put_aside(self, work: Work, died: int) -> None:
        """Suspend work at the end of its slice, or close it if there are too many."""
        batch = work.batch
        work.died = self._died[batch.id] = died
        counted = {"attempts": died} if work.reads else {}
        self._sliced[batch.id] = time.monotonic()
        if not self._may_keep(batch):
            self._close(self._works.pop(batch.id))
            self._store.release(batch, self._name, **counted)  # another server may have capacity
        elif counted and not self._store.hold(batch, self._name, self._silence, **counted):
            raise OvertakenError

    def _postpone(self, work: Work, attempts: int | None = None, note: str | None = None) -> None:
        batch = work.batch
        self._drop(batch.id)
        self._sliced[batch.id] = time.monotonic()  # other batches of its owner go first
        self._not_before[batch.id] = time.monotonic() + _AGAIN_SECONDS
        counted = {"attempts": work.died if attempts is None else attempts} if work.reads else {}
        self._store.release(batch, self._name, note=note, **counted)

    def _drop(self, batch_id: str) -> None:
        """Discard the work on a batch."""
        self._sliced.pop(batch_id, None)
        if (work := self._works.pop(batch_id, None)) is not None:
            self._close(work)

    def _close(self, work: Work) -> None:
        closing = Running(work.steps.close, "closing", work.context)
        if not closing.wait(_SHORT_SECONDS):
            return  # a hanging folder: leftovers are swept after a day
        try:
            closing.outcome()
        except OSError as error:  # a failing folder: as above
            log.error("batch %s: a file cannot be closed: %s", work.batch.batch, error)

    def _overtaken(self, batch: HttpBatch) -> None:
        self._drop(batch.id)
        now = self._store.get(batch.id)
        ended_without = now is not None and now.status.final and now.status is not HttpStatus.COMPLETED
        if batch.status is HttpStatus.VALIDATING and ended_without:
            self._rows.cancel(batch.batch)  # rows that this server entered after it lost its lease

    # -- in order --------------------------------------------------------------------------------

    def _forget_ended(self, batches: Iterable[HttpBatch]) -> None:
        """Forget batches that have ended."""
        going = {batch.id for batch in batches}
        for batch_id in (
            self._works.keys() | self._sliced.keys() | self._not_before.keys() | self._died.keys()
        ):
            if batch_id not in going:
                self._drop(batch_id)
                self._not_before.pop(batch_id, None)
                self._died.pop(batch_id, None)

    def _end_what_nobody_ends(self, batches: Iterable[HttpBatch]) -> None:
        """Expire and cancel jobs of batches, even if no worker is alive to do it."""
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

    def _forget_logged(self) -> None:
        try:
            self.forget()
        except (NightmillError, OSError) as error:  # retried in an hour
            log.warning("old files were not looked for: %s", error)
        except Exception:  # a bug, on a thread whose outcome nobody reads
            log.exception("looking for old files failed; it is tried again")

    def forget(self) -> None:
        """Delete files and ended batches past their retention, and contents without a row."""
        self._folder.sweep(self._files.known)
        self._webhooks.forget(self._client.database.now() - _ORPHANED)
        if self._keep_files is None:
            return
        before = self._client.database.now() - self._keep_files
        self._store.forget(before)
        for file_id in self._files.made_before(before):
            with suppress(InvalidTransitionError):  # a batch is being made from it
                self._files.delete(file_id, partial(self._folder.remove, file_id))
