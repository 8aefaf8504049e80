"""The end of HTTP batches: cancels remaining rows, and writes results in small steps."""

from collections.abc import Generator, Iterable
from contextlib import suppress

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.formats import FileFormat, ResultFile
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.reply.job import Job
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.working import OvertakenError, PostponedError, Steps
from nightmill.jobs.sql.files import WRITTEN, StoredFile
from nightmill.jobs.sql.http_batches import BatchOutcome, HttpBatch, HttpBatchStore, HttpStatus

_ENDINGS = {FileFormat.CSV: "csv", FileFormat.PARQUET: "parquet"}


class Finisher:
    """Writes results for one server, whose leases are held by `keeper`."""

    def __init__(self, client: Client, folder: Folder, keeper: str) -> None:
        self._client = client
        self._folder = folder
        self._keeper = keeper
        self._store = HttpBatchStore(client.database)
        self._rows = client.batches.store
        self._ids = IdSource()

    def steps(self, batch: HttpBatch) -> Steps:
        """End a leased batch, unless rows are still running: then call it again later.

        Raises PostponedError while results cannot be written, and OvertakenError.
        """
        try:
            record = self._rows.get(batch.batch)
        except BatchNotFoundError:
            self._end_without_rows(batch)
            return
        if batch.status is HttpStatus.CANCELLING or batch.broken:
            if record.cancel_requested_at is None or self._rows.unfinished(batch.batch):
                for _ in self._rows.cancelling(batch.batch):
                    yield False
            if batch.broken:
                self._rows.complete(batch.batch, self._rows.last_row(batch.batch))
            if self._rows.unfinished(batch.batch):
                return
        try:
            yield from self._write(batch, record)
        except OSError as error:
            reason = error.strerror or "input/output error"
            raise PostponedError(f"the results cannot be written: {reason}") from error

    def _write(self, batch: HttpBatch, record: BatchRecord) -> Steps:
        format = FileFormat(record.format or FileFormat.JSONL)
        dialect = Dialect.of(record.settings).named("output.csv")
        written: list[StoredFile | None] = []
        try:
            for states in ([JobState.SUCCEEDED], [JobState.FAILED, JobState.CANCELLED]):
                jobs = self._rows.in_order(batch.batch, states)
                errors = JobState.FAILED in states
                layout = Layout(format, errors, dialect)
                written.append((yield from self._write_file(batch, jobs, layout)))
            status, outcome = self._outcome(batch, *written)
        except BaseException:  # for example a full disk: the next attempt writes both files again
            self._remove(written)
            raise
        # If this raises, it may still have succeeded: the files stay, or are swept after a day.
        if not self._store.end(batch, self._keeper, status, outcome):
            self._remove(written)
            raise OvertakenError
        for file in filter(None, written):
            self._folder.settle(file.id)

    def _write_file(
        self, batch: HttpBatch, jobs: Iterable[Job], layout: Layout
    ) -> Generator[bool, None, StoredFile | None]:
        """Write a result file; None if it would be empty."""
        file_id = self._ids.draw()
        path = self._folder.coming(file_id)
        written = 0
        try:
            with ResultFile(path, layout.format, layout=layout) as file:
                for job in jobs:
                    file.write(layout.row(job))
                    written += 1
                    yield False
            size = path.stat().st_size
        except BaseException:  # whatever it is goes on up; half a file is left by none
            self._remove_content(file_id)
            raise
        if not written:
            self._remove_content(file_id)
            return None
        name = (
            f"{batch.batch}_{'error' if layout.errors else 'output'}.{_ENDINGS.get(layout.format, 'jsonl')}"
        )
        return StoredFile(file_id, batch.owner, WRITTEN, name, size, self._client.database.now())

    def _remove(self, files: Iterable[StoredFile | None]) -> None:
        for file in filter(None, files):
            self._remove_content(file.id)

    def _remove_content(self, file_id: str) -> None:
        with suppress(OSError):  # a failing folder: leftovers are swept after a day
            self._folder.remove(file_id)

    def _outcome(
        self, batch: HttpBatch, output: StoredFile | None, errors: StoredFile | None
    ) -> tuple[HttpStatus, BatchOutcome]:
        counts = self._rows.counts(batch.batch)
        total = sum(count.rows for count in counts)
        completed = sum(count.rows for count in counts if count.state is JobState.SUCCEEDED)
        outcome = BatchOutcome(
            output,
            errors,
            total,
            completed,
            total - completed,
            sum(count.prompt_tokens for count in counts),
            sum(count.completion_tokens for count in counts),
            sum(count.cached_tokens for count in counts),
            sum(count.reasoning_tokens for count in counts),
        )
        if batch.status is HttpStatus.CANCELLING:
            return HttpStatus.CANCELLED, outcome
        if batch.broken:
            ends, broken_off = batch.deadline_at, batch.finalizing_at
            expired = ends is not None and broken_off is not None and ends <= broken_off
            return HttpStatus.EXPIRED if expired else HttpStatus.FAILED, outcome
        if batch.invalid == total:
            return HttpStatus.FAILED, outcome
        late = any(count.stop_reason in (StopReason.DEADLINE, StopReason.BUDGET) for count in counts)
        return HttpStatus.EXPIRED if late else HttpStatus.COMPLETED, outcome

    def _end_without_rows(self, batch: HttpBatch) -> None:
        """End a batch that was cancelled before a row was entered, or whose rows were deleted."""
        if batch.status is HttpStatus.CANCELLING:
            self._store.fail(batch, self._keeper, HttpStatus.CANCELLED, [])
            return
        said = "the rows of this batch were deleted before their results were written"
        error = {"code": "deleted", "line": None, "message": said, "param": None}
        self._store.fail(batch, self._keeper, HttpStatus.FAILED, [error])
