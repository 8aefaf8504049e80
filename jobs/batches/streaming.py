"""Results on disk while a batch runs: rows appended as they finish, put in order at the end."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Self

from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import output_row, write_in_order
from nightmill.jobs.contract import JobState
from nightmill.jobs.formats import Destination, FileFormat, ResultFile
from nightmill.jobs.sql.batches import Finished
from nightmill.jobs.sql.jobs import Selection, Store, chunked

_COMMIT_LAG = timedelta(seconds=5)  # a row may become visible this much later than it was stamped


class ResultStream:
    """The result file and the error file of a batch that runs, into two destinations that were vetted.

    Results that a file has from an earlier run are kept, and a row that a crash cut in two is removed.
    Parquet cannot grow: then there is nothing on disk before `finish`.

    Raises BatchFileError if a file cannot be written.
    """

    def __init__(self, batch: Batch, results: Destination, errors: Destination) -> None:
        self._batch = batch
        self._store = batch.store
        self._jobs = Store(batch.store.database)
        self._destinations = (results, errors)
        self._seen = bytearray()  # one byte a row: is it on the disk?
        self._since: datetime | None = None
        self._files: tuple[ResultFile, ResultFile] | None = None
        if batch.format is FileFormat.PARQUET:
            return
        # Errors are few rows and quickly written; and one that failed may have been retried since.
        self._files = (results.grow(), errors.grow(anew=True))
        if there := self._files[0].ids():
            for row in self._store.finished_since(batch.name, None):
                if row.job_id in there:
                    self._is_new(row)

    def update(self) -> int:
        """Append what has finished since the last call, and hand it to the operating system."""
        if self._files is None:
            return 0
        now = self._store.database.now()
        new = filter(self._is_new, self._store.finished_since(self._batch.name, self._since))
        written = sum(self._append(chunk) for chunk in chunked(new))
        self._since = now - _COMMIT_LAG
        for file in self._files:
            file.flush()
        return written

    def finish(self) -> tuple[int, int]:
        """Write both files anew, in the order of the input: (results, errors)."""
        self.close()
        results, errors = self._destinations
        form = self._batch.format
        return (
            write_in_order(results, self._batch.results(), form),
            write_in_order(errors, self._batch.errors(), form, errors=True),
        )

    def close(self) -> None:
        """Leave the files as they are."""
        for file in self._files or ():
            file.close()
        self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _is_new(self, finished: Finished) -> bool:
        """True the first time that this is asked of a row."""
        if finished.row >= len(self._seen):
            self._seen.extend(bytes(finished.row + 1024 - len(self._seen)))
        new = not self._seen[finished.row]
        self._seen[finished.row] = 1
        return new

    def _append(self, finished: Iterable[Finished]) -> int:
        assert self._files is not None
        written = 0
        for job in self._jobs.find(Selection(ids=[row.job_id for row in finished])):
            if job.state.final:
                errors = job.state is not JobState.SUCCEEDED
                self._files[errors].write(output_row(job, self._batch.format, errors=errors))
                written += 1
        return written
