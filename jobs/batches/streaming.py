"""Result files that grow while a batch runs: rows are appended as they finish and sorted at the end."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Self

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import write_in_order
from nightmill.jobs.errors import BatchFileUnavailableError
from nightmill.jobs.formats import Destination, ResultFile
from nightmill.jobs.sql.batch_reading import Finished
from nightmill.jobs.sql.batches import UNSUCCESSFUL
from nightmill.jobs.sql.jobs import Selection, Store, chunked

_COMMIT_LAG = timedelta(seconds=5)  # a row may become visible this much later than it was stamped


class ResultStream:
    """The growing result file and error file of a batch; the destinations were checked before.

    Results from an earlier run are kept, and a row that a crash truncated is removed. A Parquet file cannot
    grow, so nothing is on disk before `finish`.

    in_order  after `finish`: both files are in the order of the input

    Raises BatchFileError if a file cannot be written.
    """

    def __init__(self, batch: Batch, results: Destination, errors: Destination) -> None:
        self._batch = batch
        self._store = batch.store
        self._jobs = Store(batch.store.database)
        self._destinations = (results, errors)
        self._seen = bytearray()  # one byte a row: 1 if it is on disk
        self._since: datetime | None = None
        self.in_order = False
        self._files: tuple[ResultFile, ResultFile] | None = None
        if not (results.layout.grows and errors.layout.grows):
            return
        # Errors are written anew: they are few, and a failed row may have been retried since.
        self._files = (results.grow(), errors.grow(anew=True))
        if there := self._files[0].ids():
            for row in self._store.finished_since(batch.name, None):
                if row.job_id in there:
                    self._mark(row.row)

    def update(self) -> int:
        """Append the rows finished since the last call and flush them; returns their number.

        May be called again after BatchFileUnavailableError (the disk was full).
        """
        if self._files is None:
            return 0
        self._flush()  # rows that a full disk rejected last time
        now = self._store.database.now()
        new = filter(self._is_new, self._store.finished_since(self._batch.name, self._since))
        written = sum(self._append(chunk) for chunk in chunked(new))
        self._flush()
        self._since = now - _COMMIT_LAG
        return written

    def finish(self) -> tuple[int, int]:
        """Rewrite both files in the order of the input; returns (results, errors).

        Needs disk space for a copy. Without it, a file that has all its rows stays in the order in which they
        ended, and `in_order` is False; otherwise raises BatchFileUnavailableError, after which it may be
        called again.
        """
        self.close()
        results, errors = self._destinations
        self.in_order = True
        return self._put_in_order(results, errors=False), self._put_in_order(errors, errors=True)

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

    def _put_in_order(self, destination: Destination, *, errors: bool) -> int:
        jobs = self._batch.errors() if errors else self._batch.results()
        try:
            return write_in_order(destination, jobs)
        except BatchFileUnavailableError:
            states = UNSUCCESSFUL if errors else (JobState.SUCCEEDED,)
            ids = list(self._store.ids(self._batch.name, *states))
            if not destination.layout.grows or not destination.holds(ids):
                raise
            self.in_order = False
            return len(ids)

    def _is_new(self, finished: Finished) -> bool:
        """Return False for a row that is on disk or about to be."""
        return finished.row >= len(self._seen) or not self._seen[finished.row]

    def _mark(self, row: int) -> None:
        if row >= len(self._seen):
            self._seen.extend(bytes(row + 1024 - len(self._seen)))
        self._seen[row] = 1

    def _flush(self) -> None:
        for file in self._files or ():
            file.flush()

    def _append(self, finished: Iterable[Finished]) -> int:
        assert self._files is not None
        written = 0
        for job in self._jobs.find(Selection(ids=[row.job_id for row in finished])):
            if job.state.final and job.row is not None:
                errors = job.state is not JobState.SUCCEEDED
                self._mark(job.row)  # before writing: rows that a full disk rejects stay buffered
                self._files[errors].write(self._destinations[errors].layout.row(job))
                written += 1
        return written
