"""What a server does for batches between requests: enters their rows, waits for them, writes their results.

Any server does the next step of any batch. Each step can be done again: rows are entered once however often
their file is read, and a result file counts from the moment when its row and the end of its batch are
committed together. So a server that dies loses nothing, and another goes on where its claim has run out.
"""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from nightmill.jobs.batches.result_files import output_row
from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState, StopReason
from nightmill.jobs.errors import (
    BatchFileError,
    BatchNotFoundError,
    DatabaseUnreachableError,
    InvalidRequestError,
    InvalidTransitionError,
    NightmillError,
)
from nightmill.jobs.formats import FileFormat, ResultFile
from nightmill.jobs.ids import IdSource
from nightmill.jobs.job import Job
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.inputs import EndpointFile, file_error, row_error
from nightmill.jobs.sql.files import WRITTEN, FileStore, StoredFile
from nightmill.jobs.sql.http_batches import HttpBatch, HttpBatchStore, HttpStatus, Outcome
from nightmill.jobs.sql.patience import until
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.webhooks import WebhookStore

log = logging.getLogger("nightmill.server")

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # for the step under way, and for giving claims back, when the server ends
_AGAIN_SECONDS = 15.0  # after a step that failed
_SWEEP_SECONDS = 5.0  # as a worker's heartbeat
_FORGET_SECONDS = 3600.0  # between two looks for what need not be kept
_ORPHANED = timedelta(days=1)  # webhooks of batches that are gone
_MOST_ERRORS = 100  # rows that are named in a batch; the file of errors has all
_ROWS_PER_CLAIM = 1024
_ENDINGS = {FileFormat.CSV: "csv", FileFormat.PARQUET: "parquet"}


class OvertakenError(Exception):
    """The batch is another's now, or was cancelled, or this server ends."""


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
        self._ids = IdSource()
        self._name = self._ids.draw()
        self._keep_files = keep_files
        self._silence = timedelta(seconds=client.settings.stale_seconds)  # as a worker's
        self._over = threading.Event()
        self._bell = threading.Event()
        self._not_before: dict[str, float] = {}
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
        """Do the next step of every batch that needs one, and that nobody else is doing."""
        over, batches = self._store.over(), self._store.open()
        self._not_before = {one.id: self._not_before[one.id] for one in batches if one.id in self._not_before}
        self._end_what_nobody_ends(batches)
        for batch in batches:
            if self._over.is_set():
                return
            going = batch.status is HttpStatus.IN_PROGRESS and batch.id not in over
            if going or time.monotonic() < self._not_before.get(batch.id, 0.0):
                continue
            try:
                self._step(batch)
            except OvertakenError:
                continue
            except DatabaseUnreachableError:
                raise
            except Exception:
                # A full disk, or a mistake of ours, which its owner cannot mend: the other batches go on.
                log.exception("batch %s: a step failed; it is tried again", batch.batch)
                self._not_before[batch.id] = time.monotonic() + _AGAIN_SECONDS

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

    def _step(self, batch: HttpBatch) -> None:
        match batch.status:
            case HttpStatus.VALIDATING:
                if self._claim(batch):
                    self._validate(batch)
            case HttpStatus.IN_PROGRESS:
                if self._store.finalize(batch):  # its rows have ended
                    self.wake()
            case HttpStatus.CANCELLING:
                if self._claim(batch):
                    self._rows.cancel(batch.batch)
                    if not self._rows.unfinished(batch.batch):
                        self._finish(batch)
            case HttpStatus.FINALIZING:
                if self._claim(batch):
                    self._finish(batch)

    def _claim(self, batch: HttpBatch) -> bool:
        return self._store.claim(batch, self._name, self._silence)

    def _renew(self, batch: HttpBatch) -> None:
        if self._over.is_set() or not self._claim(batch):
            raise OvertakenError

    # -- entering rows ---------------------------------------------------------------------------

    def _validate(self, batch: HttpBatch) -> None:
        path = self._folder.find(batch.input_file)
        if not path.exists() and not self._is_late(batch):
            log.error("batch %s: its file is not in the folder of this server: share it", batch.batch)
            self._not_before[batch.id] = time.monotonic() + _AGAIN_SECONDS
            self._store.let_go(self._name)  # another server may have it
            return
        times = {"scheduled_at": batch.scheduled_at, "deadline": batch.deadline_at}
        try:
            self._client.batches.submit(
                EndpointFile(path, batch.endpoint),
                batch.settings | times,
                name=batch.batch,
                check_model=self._client.check_model,
                on_rows=lambda rows: self._renew(batch),
            )
        except OvertakenError:
            now = self._store.get(batch.id)
            if now is not None and now.status.final:  # another has ended it meanwhile, without these rows
                self._rows.cancel(batch.batch)
            raise
        except (BatchFileError, InvalidRequestError) as error:
            status = HttpStatus.EXPIRED if self._is_late(batch) else HttpStatus.FAILED
            self._rows.cancel(batch.batch)  # what was entered before the file broke off
            self._store.fail(batch, status, [file_error(error, path)])
            return
        invalid, rows = self._store.bad_rows(batch, _MOST_ERRORS)
        errors = [row_error(line, error) for line, error in rows]
        if self._store.begin(batch, self._name, invalid, errors):
            self.wake()

    def _is_late(self, batch: HttpBatch) -> bool:
        return batch.deadline_at is not None and batch.deadline_at <= self._client.database.now()

    # -- writing results -------------------------------------------------------------------------

    def _finish(self, batch: HttpBatch) -> None:
        try:
            format = FileFormat(self._rows.get(batch.batch).format or FileFormat.JSONL)
        except BatchNotFoundError:
            format = None
        if format is None:
            self._end_without_rows(batch)
            return
        written: list[StoredFile | None] = []
        try:
            for states in ([JobState.SUCCEEDED], [JobState.FAILED, JobState.CANCELLED]):
                jobs = self._rows.in_order(batch.batch, states)
                written.append(self._write(batch, jobs, format, errors=len(written) == 1))
            status, outcome = self._outcome(batch, *written)
        except BaseException:  # as where the disk is full: the next try writes both files again
            self._take_away(written)
            raise
        # If this raises, it may have been done all the same: the files stay, or are swept in a day.
        if not self._store.end(batch, self._name, status, outcome):
            self._take_away(written)
            raise OvertakenError
        for file in filter(None, written):
            self._folder.settle(file.id)

    def _take_away(self, written: Iterable[StoredFile | None]) -> None:
        for file in filter(None, written):
            self._folder.remove(file.id)

    def _write(
        self, batch: HttpBatch, jobs: Iterable[Job], format: FileFormat, *, errors: bool
    ) -> StoredFile | None:
        """Write a file that is to be entered; None if not one row would be in it."""
        file_id = self._ids.draw()
        path = self._folder.coming(file_id)
        written = 0
        try:
            with ResultFile(path, format, errors=errors) as file:
                for written, job in enumerate(jobs, 1):
                    file.write(output_row(job, format, errors=errors))
                    if written % _ROWS_PER_CLAIM == 0:
                        self._renew(batch)
        except BaseException:  # whatever it is goes on up; half a file is left by none
            self._folder.remove(file_id)
            raise
        if not written:
            self._folder.remove(file_id)
            return None
        name = f"{batch.batch}_{'error' if errors else 'output'}.{_ENDINGS.get(format, 'jsonl')}"
        now = self._client.database.now()
        return StoredFile(file_id, batch.owner, WRITTEN, name, path.stat().st_size, now)

    def _outcome(
        self, batch: HttpBatch, output: StoredFile | None, errors: StoredFile | None
    ) -> tuple[HttpStatus, Outcome]:
        counts = self._rows.counts(batch.batch)
        total = sum(count.rows for count in counts)
        completed = sum(count.rows for count in counts if count.state is JobState.SUCCEEDED)
        outcome = Outcome(
            output,
            errors,
            total,
            completed,
            total - completed,
            sum(count.prompt_tokens for count in counts),
            sum(count.completion_tokens for count in counts),
        )
        if batch.status is HttpStatus.CANCELLING:
            return HttpStatus.CANCELLED, outcome
        if batch.invalid == total:
            return HttpStatus.FAILED, outcome
        late = any(count.stop_reason is StopReason.DEADLINE for count in counts)
        return HttpStatus.EXPIRED if late else HttpStatus.COMPLETED, outcome

    def _end_without_rows(self, batch: HttpBatch) -> None:
        """It was cancelled before a row was entered, or somebody has deleted the rows."""
        if batch.status is HttpStatus.CANCELLING:
            self._store.fail(batch, HttpStatus.CANCELLED, [])
            return
        said = "the rows of this batch were deleted before their results were written"
        error = {"code": "deleted", "line": None, "message": said, "param": None}
        self._store.fail(batch, HttpStatus.FAILED, [error])

    # -- in order --------------------------------------------------------------------------------

    def _end_what_nobody_ends(self, batches: Iterable[HttpBatch]) -> None:
        """Batches end in time and when they are cancelled, also if no worker lives that would see to it."""
        waiting = any(batch.cancelling_at is not None or self._is_late(batch) for batch in batches)
        if waiting and time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_SECONDS
            self._sweep.rescue(self._silence)
            self._sweep.expire()

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
