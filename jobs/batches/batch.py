"""The API of batches: submit a file or an iterable, get its status, wait, read results, cancel, retry,
delete.

batch = jobs.submit_batch("prompts.jsonl", name="tonight", max_tokens=256, deadline=six_in_the_morning)
print(batch.wait().state)
for job in batch.results():
    print(job.custom_id, job.text)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import JobState, JsonObject
from nightmill.jobs.batches.comparing import Difference, compare
from nightmill.jobs.batches.limits import LimitsChanged, change_limits
from nightmill.jobs.batches.requeueing import (
    QueuedAgain,
    Where,
    announced,
    check_changes,
    check_max_tokens,
    conditions_of,
)
from nightmill.jobs.batches.result_files import source_of, vet, write_in_order
from nightmill.jobs.batches.submission import OnRows
from nightmill.jobs.batches.unserved import (
    served_models,
    stalled,
    takes,
    unserved_models,
    within_hours,
    workers_of,
)
from nightmill.jobs.batches.waiting import in_time
from nightmill.jobs.errors import (
    WaitTimeoutError,
)
from nightmill.jobs.formats import Destination, FileFormat
from nightmill.jobs.formats.dialect import Dialect
from nightmill.jobs.formats.frames import arrow_table, pandas_frame, with_pandas
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.formats.places import OnThisDisk, OutputTarget, spool
from nightmill.jobs.formats.shards import IntoFolder, is_folder
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.reply.batch_status import BatchRecord, BatchState, BatchStatus, RowCount, make_status
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import deadline_moment
from nightmill.jobs.request.limits import Limits
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatchStore
from nightmill.jobs.sql.queue_room import rows_before
from nightmill.jobs.sql.requeueing import Requeueing
from nightmill.jobs.tables.arrow_files import table_of
from nightmill.jobs.tables.into import UsersTable
from nightmill.jobs.tables.layout import TableLayout, layout_in_database, layout_of
from nightmill.jobs.tables.shape import Shape

_POLL_SECONDS = 0.5
_POLL_SHARE = 10  # polling takes at most a tenth of the time, though the status of a huge batch is slow


class Batch:
    """A submitted batch. It holds no connection, and its memory does not grow with the rows."""

    def __init__(self, record: BatchRecord, store: BatchStore, announcer: Announcer) -> None:
        self.name = record.name
        self.record = record
        self.store = store
        self.renamed: Mapping[str, int] = {}  # rows of this submission that named other models, by model
        self._announcer = announcer

    def __repr__(self) -> str:
        return f"<batch {self.name!r}>"

    @property
    def format(self) -> FileFormat:
        """The format of its result files; those of a table may have any, by the name of the file."""
        return FileFormat(self.record.format) if self.record.format else FileFormat.JSONL

    @cached_property
    def shape(self) -> Shape | None:
        """The columns of the results, if the batch was submitted as a table with a template; else None."""
        return Shape.read(self.record.settings)

    @property
    def dialect(self) -> Dialect:
        """The dialect of its results in CSV: that of the input."""
        return Dialect.of(self.record.settings)

    def status(self, *, errors: bool = True, whole_pace: bool | None = None) -> BatchStatus:
        """Return the current status. `errors`: also group the errors, which reads the failed rows.

        errors      also list unserved models that rows wait for, even while other rows end, and count the
                    rows of others that come first, if none runs
        whole_pace  also compute the speed of an ended batch, which reads all its rows; by default like
        `errors`.
                    Without both, only indexes are read
        """
        record = self.store.get(self.name)
        counts = self.store.counts(self.name)
        pace = self.store.recent_pace(self.name)
        groups = self.store.error_groups(self.name) if errors else []
        held = self.store.held(self.name)
        now = self.store.database.now()
        workers = workers_of(self.store)
        served = frozenset(worker.model for worker in workers)
        asked = errors or record.model is not None or stalled(pace)
        unserved = unserved_models(self.store, record, counts, served) if asked else []
        status = make_status(
            record,
            counts,
            pace,
            groups,
            now,
            served=takes(served, record.model),
            unserved=unserved,
            held=held,
        )
        if not status.state.final:
            status = within_hours(status, workers, now)
            if errors and status.state is BatchState.QUEUED:
                status = replace(status, rows_before=rows_before(self.store.database, self.name))
            return status
        whole_wanted = errors if whole_pace is None else whole_pace
        whole = self.store.whole_pace(self.name) if whole_wanted else None
        return make_status(record, counts, whole, groups, now)

    def unserved(self, counts: Sequence[RowCount]) -> list[str | None]:
        """Return the models that no live worker serves among those of queued rows in `counts`; None: any
        model."""
        return unserved_models(self.store, self.record, counts, served_models(self.store))

    def wait(
        self,
        *,
        timeout: float | None = None,
        on_status: Callable[[BatchStatus], object] = lambda status: None,
    ) -> BatchStatus:
        """Return the status once the state is final. `on_status` is called with every status on the way.

        Raises WaitTimeoutError after `timeout` seconds; the rows continue.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            with in_time(give_up_at):
                status = self.status(errors=False)
                if status.state.final:
                    status = self.status()
            on_status(status)
            if status.state.final:
                return status
            pause = max(_POLL_SECONDS, _POLL_SHARE * (time.monotonic() - began))
            if give_up_at is not None:
                left = give_up_at - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(
                        f"batch {self.name!r} is {status.state} with {status.done} of "
                        f"{status.expected_rows} rows done in the time given; it goes on"
                    )
                pause = min(pause, left)
            time.sleep(pause)

    def results(self) -> Iterator[Job]:
        """Yield the rows that have succeeded so far, in the order of the file."""
        return self.store.in_order(self.name, [JobState.SUCCEEDED])

    def errors(self) -> Iterator[Job]:
        """Yield the rows that have ended without a complete result so far, in the order of the file."""
        return self.store.in_order(self.name, [JobState.FAILED, JobState.CANCELLED])

    def to_arrow(self, *, errors: bool = False) -> Any:
        """Return the rows that have succeeded so far as a pyarrow.Table with the columns of a result file.

        Columns that were kept of a table have their types. `errors` returns the rows that have ended without
        a result instead. Raises MissingExtraError without pyarrow.
        """
        if self.shape is not None:
            layout = TableLayout(FileFormat.ARROW, self.shape, errors)
            return table_of(map(layout.row, self.errors() if errors else self.results()), layout)
        return arrow_table(*self._rows_and_columns(errors))

    def to_pandas(self, *, errors: bool = False) -> Any:
        """Return the same as `to_arrow` as a pandas.DataFrame; raises MissingExtraError without pandas."""
        if self.shape is not None:
            with_pandas()
            return self.to_arrow(errors=errors).to_pandas()
        return pandas_frame(*self._rows_and_columns(errors))

    def write_results(
        self, path: str | Path, *, overwrite: bool = False, on_rows: OnRows | None = None
    ) -> int:
        """Write the rows that have succeeded so far to a file, in the format of its ending; returns how many.

        Results of OpenAI's rows are JSON lines; a name with another ending has the batch's format. A name
        that ends in a slash is a folder, which gets Parquet files of 100,000 rows each.

        The file appears once it is complete. An existing file is replaced if it contains only results of this
        batch; another one only with `overwrite`, and the batch's input never. Raises BatchFileError.
        """
        return self._write(path, errors=False, overwrite=overwrite, on_rows=on_rows)

    def write_errors(
        self, path: str | Path, *, overwrite: bool = False, on_rows: OnRows | None = None
    ) -> int:
        """Write the rows that have ended without a complete result, like `write_results`."""
        return self._write(path, errors=True, overwrite=overwrite, on_rows=on_rows)

    def _write(self, path: str | Path, *, errors: bool, overwrite: bool, on_rows: OnRows | None) -> int:
        if not is_folder(str(path)):
            return self.write_to(OnThisDisk(path), errors=errors, overwrite=overwrite, on_rows=on_rows)
        with spool() as folder:
            place = IntoFolder(str(path), folder)
            written = self.write_to(place, errors=errors, overwrite=overwrite, on_rows=on_rows)
            place.deliver()
            return written

    def write_to(self, place: OutputTarget, *, errors: bool, overwrite: bool, on_rows: OnRows | None) -> int:
        """Write results or errors to the local path of a target, without uploading it."""
        apart = source_of(self.record.source)
        with Destination(
            place.path,
            self.format,
            errors=errors,
            overwrite=overwrite,
            apart_from=apart,
            label=place.label,
            layout=layout_of(self.shape, self.format, place.path, errors=errors, dialect=self.dialect),
            dialect=self.dialect,
        ) as file:
            vet(file, self.store, self.name, self.record.fingerprint)
            jobs = self.errors() if errors else self.results()
            return write_in_order(file, jobs, on_rows=on_rows)

    def write_into(self, target: str, *, errors: bool = False, on_rows: OnRows | None = None) -> int:
        """Write the rows that have succeeded so far into a table of a database; returns how many.

        target  `URL#TABLE`, PostgreSQL or SQLite; the table is made if it is not there
        errors  write the rows that have ended without a complete result instead

        A row of a job that is there already is replaced. Rows are written in groups, a transaction each:
        after an interruption the same call goes on. Raises BatchFileError.
        """
        jobs = self.errors() if errors else self.results()
        layout = layout_in_database(self.shape, errors=errors)
        return UsersTable(target).write(jobs, layout, on_rows=on_rows)

    def diff(self, other: "Batch") -> Difference:
        """Compare the answers with another batch's, row by row: of other prompts, models or parameters."""
        return compare(self.name, other.name, self.store)

    def cancel(self) -> tuple[int, int]:
        """Cancel all rows that are not final: (cancelled now, running and asked to stop).

        Running rows stop within a second and keep their text so far.
        """
        return self.store.cancel(self.name)

    def retry_failed(self, *, deadline: datetime | timedelta | None = None) -> int:
        """Queue the rows again that failed, expired or were cancelled; returns their number.

        Ids and seeds stay. Rows that succeeded, and bad rows of the file, are not changed. Raises
        BatchConflictError if the batch is being deleted.
        """
        ends_at = deadline_moment(deadline, self.store.database.now())
        queued, room = 0, None
        for groups in self.store.retry_failed(self.name, ends_at):
            queued += sum(map(len, groups.values()))
            room = self._announcer.announce_first(groups, room)
        self._reopen_over_http(queued)
        return queued

    def extend(self, max_tokens: int, *, deadline: datetime | timedelta | None = None) -> QueuedAgain:
        """Queue the rows again that stopped by `length`, with this larger limit.

        Their tokens were kept, so that continuing costs a prefill. The longer text begins with the shorter
        one, and is what the row would have had with that limit at once, if a worker with the same arithmetic
        continues it. Until then, and if it ends early, the row keeps the shorter text. `Job.history` tells
        what the row was. Raises InvalidParameterError, and BatchConflictError if the batch is being deleted.
        """
        limit = check_max_tokens(max_tokens)
        ends_at = deadline_moment(deadline, self.store.database.now())
        done = announced(Requeueing(self.store).extend(self.name, limit, ends_at), self._announcer)
        self._reopen_over_http(done.rows)
        return done

    def retry(
        self,
        *,
        where: Where | None = None,
        new_seeds: bool = False,
        deadline: datetime | timedelta | None = None,
        **changes: Any,
    ) -> QueuedAgain:
        """Queue rows again that failed, expired or were cancelled, with other parameters.

        where      only rows with these values of `state` and `stop_reason`, such as {"state": "failed"}
        new_seeds  give each row a new random seed
        changes    limits and numbers of sampling, such as temperature (`batches.requeueing.CHANGEABLE`)

        What a row was stays in `Job.history`. Rows that succeeded, and bad rows of the file, are not changed.
        Raises InvalidParameterError, and BatchConflictError if the batch is being deleted.
        """
        changed, conditions = check_changes(changes), conditions_of(where or {})
        ends_at = deadline_moment(deadline, self.store.database.now())
        groups = Requeueing(self.store).retry(self.name, conditions, changed, ends_at, new_seeds=new_seeds)
        done = announced(groups, self._announcer)
        self._reopen_over_http(done.rows)
        return done

    def _reopen_over_http(self, queued: int) -> None:
        """Let a server write the files of a batch over HTTP anew, once its rows have ended again."""
        if queued and self.name.startswith(BATCH_PREFIX):
            HttpBatchStore(self.store.database).reopen(self.name.removeprefix(BATCH_PREFIX))

    def set_limits(
        self,
        *,
        budget: str | None = None,
        max_failures: str | None = None,
        deadline: datetime | timedelta | None = None,
    ) -> LimitsChanged:
        """Change the limits, such as budget="40M-tokens"; "none" removes one, and what is not given stays.

        Rows that a limit had ended are queued again if no limit is met any more, with the deadline of the
        batch if that is still to come, or with this one. Raises InvalidParameterError, and BatchConflictError
        if the batch is being deleted.
        """
        limits = Limits.of({"budget": budget, "max_failures": max_failures})
        return change_limits(self.store, self._announcer, self.name, limits, deadline)

    def delete(self, on_rows: OnRows | None = None) -> int:
        """Delete the batch and all its rows; returns the number of rows.

        Once begun, the batch accepts neither rows nor retries; another call resumes an interrupted deletion.
        Raises InvalidTransitionError while rows are not final.
        """
        gone = 0
        for gone in Deletion(self.store.database).run(self.name):
            if on_rows is not None:
                on_rows(gone)
        return gone

    def _rows_and_columns(self, errors: bool) -> tuple[Iterator[JsonObject], Mapping[str, str]]:
        jobs = self.errors() if errors else self.results()
        layout = Layout(FileFormat.PARQUET, errors)
        return map(layout.row, jobs), layout.columns
