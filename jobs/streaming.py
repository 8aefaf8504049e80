"""Results on disk while a batch runs: rows appended as they finish, put in order at the end."""

import csv
import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from jobs.batch_store import BatchStore, Finished
from jobs.batches import Batch
from jobs.batchfile import FileFormat, ResultFile
from jobs.contract import Job, JobState
from jobs.errors import BatchFileError
from jobs.result_files import output_row, write_in_order
from jobs.store import Selection, Store, chunked

_COMMIT_LAG = timedelta(seconds=5)  # a row may become visible this much later than it was stamped


class ResultStream:
    """The result file and the error file of a batch that runs.

    Results that a file has from an earlier run are kept, and a row that a crash cut in two is removed.
    Parquet cannot grow: then there is nothing on disk before `finish`. `overwrite`: begin anew, whatever is
    there.

    Raises BatchFileError where a file cannot be written or belongs to something else.
    """

    def __init__(
        self, batch: Batch, store: BatchStore, results: Path, errors: Path, *, overwrite: bool = False
    ) -> None:
        self._batch = batch
        self._batches = store
        self._jobs = Store(store.database)
        self._paths = (results, errors)
        self._seen = bytearray()  # one byte a row: is it on the disk?
        self._since: datetime | None = None
        self._files: tuple[ResultFile, ResultFile] | None = None
        if batch.format is FileFormat.PARQUET:
            return
        append = not overwrite and results.exists() and results.stat().st_size > 0
        if append:
            self._check_ours(results)
        # Few rows and quickly written; and one that failed may have been retried since.
        self._files = (
            ResultFile(results, batch.format, append=append),
            ResultFile(errors, batch.format, errors=True),
        )
        if append:
            there = self._files[0].ids()
            for row in store.finished_since(batch.name, None):
                if row.job_id in there:
                    self._is_new(row)

    def update(self) -> int:
        """Append what has finished since the last call, and hand it to the operating system."""
        if self._files is None:
            return 0
        now = self._batches.database.now()
        new = filter(self._is_new, self._batches.finished_since(self._batch.name, self._since))
        written = sum(self._append(chunk) for chunk in chunked(new))
        self._since = now - _COMMIT_LAG
        for file in self._files:
            file.flush()
        return written

    def finish(self) -> tuple[int, int]:
        """Write both files anew, in the order of the input: (results, errors)."""
        self.close()
        results, errors = self._paths
        return write_in_order(self._batch, results), write_in_order(self._batch, errors, errors=True)

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

    def _check_ours(self, path: Path) -> None:
        """Refuse to touch a file whose first row is none of this batch."""
        job = self._first_job(path)
        if job is None or job.batch != self._batch.name:
            raise BatchFileError(
                f"{path}: is there already, and is not of batch {self._batch.name!r}: name another file, "
                "remove this one, or give --overwrite"
            )

    def _first_job(self, path: Path) -> Job | None:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                first = (
                    next(csv.DictReader(file))
                    if self._batch.format is FileFormat.CSV
                    else json.loads(next(file))
                )
            found = self._jobs.find(Selection(ids=[str(first["id"])]))
        except (StopIteration, ValueError, KeyError, TypeError):
            return None
        return found[0] if found else None
