"""Submission of a file's rows as jobs, in committed groups, so that it can be interrupted and resumed.

Rows are entered in the order of the file. Submitting the file again skips existing rows and continues;
concurrent submissions share the work, and no row is entered twice.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.batches.grouping import RowGroup, characters
from nightmill.jobs.errors import (
    BatchFileError,
    BatchFileUnavailableError,
    EmptyBatchFileError,
    InvalidRequestError,
    RowCode,
)
from nightmill.jobs.formats import InputFile, InputRow, RowError, rows_from
from nightmill.jobs.formats.rows import printable
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.jobs import by_queue, mark_unsent
from nightmill.jobs.sql.queue_room import leave_room
from nightmill.jobs.tables.following import FollowingRows
from nightmill.jobs.tables.memory import TableItems

_MOST_RENAMED = 100  # other models named by rows that are counted
OnRows = Callable[[int], None]
"""Called after each group with the number of rows read so far."""
Steps = Generator[int, None, int]
"""Yields after each row the number of committed rows; returns the number of rows in the file."""


class Submission:
    """Enters the rows of one batch.

    `defaults` apply where a row has no value; their model, if any, overrides the rows'. `check_model` raises
    UnknownModelError for a name that no worker has.
    """

    def __init__(
        self,
        record: BatchRecord,
        defaults: JobSpec,
        *,
        max_attempts: int,
        shard_size: int,
        check_model: Callable[[str], None],
    ) -> None:
        self._shard_size = shard_size
        self._record = record
        self._defaults = replace(
            defaults, batch=record.name, scheduled_at=record.scheduled_at, deadline=record.deadline_at
        )
        self._max_attempts = max_attempts
        self._check_model = check_model
        self._models: dict[str, RowError | None] = {}
        self._ids = IdSource()
        self._announcing = True
        self._entered = False  # whether any row is entered, now or earlier
        self._custom_ids: dict[str, str] | None = None  # job ids of rows before, once a row follows one
        self.renamed: Counter[str] = Counter()
        """Number of rows whose model the batch's model replaced, by name, for the first names."""

    def steps(
        self,
        source: "InputFile | TableItems | FollowingRows | Iterable[Any]",
        store: BatchStore,
        announcer: Announcer,
    ) -> Steps:
        """Enter all missing rows, announce them, and mark the batch as complete.

        Raises BatchFileError if the file cannot be read or changes meanwhile: then the batch stays
        incomplete, with rows of the original file only.
        """
        if isinstance(source, TableItems | FollowingRows):
            return (yield from self._enter(source.rows(self._defaults), store, announcer))
        if not isinstance(source, InputFile):
            return (yield from self._enter(rows_from(source, self._defaults), store, announcer))
        try:
            return (yield from self._enter(source.rows(self._defaults), store, announcer, source))
        except BatchFileUnavailableError:  # not a fault of the content
            raise
        except EmptyBatchFileError:
            store.complete(self._record.name, 0)
            raise
        except BatchFileError as error:
            if source.changed():  # the change explains the error
                raise self._changed(source) from error
            raise

    def _enter(
        self,
        rows: Iterable[InputRow],
        store: BatchStore,
        announcer: Announcer,
        source: InputFile | None = None,
    ) -> Steps:
        name = self._record.name
        last = store.last_row(name)
        self._entered = last > 0
        committed = 0
        group: RowGroup[InputRow] = RowGroup()

        def commit() -> None:
            nonlocal committed, group
            if source is not None and source.changed():
                raise self._changed(source)  # these rows may come from the new file
            now = store.database.now()
            missing = [row for row in group.rows if row.number > last]
            if self._custom_ids is None and any(row.after is not None for row in missing):
                self._custom_ids = dict(store.custom_ids(name))
            jobs = [self._job(row, now) for row in missing]
            leave_room(store.database, jobs, self._shard_size)
            followed = store.insert_rows(name, jobs) if jobs else None
            if self._custom_ids is not None and jobs:  # another submission may have been faster
                self._custom_ids.update(store.custom_ids(name, jobs[0]["row"], jobs[-1]["row"]))
            self._entered = self._entered or bool(jobs)
            if followed is not None:
                due = set(followed)
                # An unreachable broker is tried once; workers find the other jobs in the table.
                self._announcing = self._announcing and announcer.announce(
                    by_queue(job for job in jobs if job["sent_at"] or job["id"] in due)
                )
                left = due.difference(job["id"] for job in jobs) if self._announcing else due
                if left:
                    mark_unsent(store.database, sorted(left))
            committed += len(group.rows)
            group = RowGroup()

        for row in rows:
            if group.add(row, characters(row.prompt) + characters(row.kept)):
                commit()
            yield committed
        if group.rows:
            commit()
            yield committed
        if source is not None and source.changed(self._record.fingerprint):
            raise self._changed(source)
        store.complete(name, committed)
        return committed

    def _changed(self, source: InputFile) -> BatchFileError:
        name = self._record.name
        if not self._entered:
            return BatchFileError(f"{source.label}: changed while it was submitted: submit it once more")
        return BatchFileError(
            f"{source.label}: changed while it was submitted, so batch {name!r} is not complete; its rows "
            "are of the file as it was: submit that once more, or delete the batch "
            f"(nightmill batch cancel {name}, nightmill batch delete {name}) and submit the file as it is now"
        )

    def _job(self, row: InputRow, now: datetime) -> dict[str, Any]:
        """Return the row of `jobs`. All rows have the same keys, so that one statement can insert many."""
        spec, error = row.spec or self._defaults, row.error
        if self._defaults.model is not None and spec.model != self._defaults.model:
            if spec.model in self.renamed or len(self.renamed) < _MOST_RENAMED:
                self.renamed[str(spec.model)] += 1
            spec = replace(spec, model=self._defaults.model)
        if error is None:
            error = self._model_error(spec.model)
        prior = row.prior
        if error is None and row.after is not None:
            prior = (self._custom_ids or {}).get(row.after)
            error = None if prior is not None else _no_prior(row.after)
        if error is not None and spec.held is not None:
            spec = replace(spec, held=None)  # it ends here, and waits for nothing
        job = spec.row(self._ids.draw(), now, self._max_attempts) | {
            "row": row.number,
            "prior": prior,
            "custom_id": row.custom_id,
            "stop_reason": None,
            "error": None,
            "errors": None,
            "finished_at": None,
            "cancel_requested_at": None,
        }
        if row.kept is not None:
            job["metadata"] = row.kept or None
        if not self._announcing:
            job["sent_at"] = None
        if self._custom_ids is not None and row.custom_id is not None:
            self._custom_ids.setdefault(row.custom_id, job["id"])
        return job if error is None else job | _failed(row, error, now)

    def _model_error(self, model: str | None) -> RowError | None:
        if model is None or model == self._defaults.model:
            return None
        if model not in self._models:
            self._models[model] = None
            try:
                self._check_model(model)
            except InvalidRequestError as error:
                self._models[model] = RowError.of(error)
        return self._models[model]


def _no_prior(after: str) -> RowError:
    said = f"after: no row before this one has the custom_id {after[:100]!r}; a row follows one above it"
    return RowError(RowCode.INVALID_VALUE, printable(said), "after")


def _failed(row: InputRow, error: RowError, now: datetime) -> dict[str, Any]:
    """Return the columns of a job for a bad row: final from the start, without a prompt."""
    entry = {"code": error.code, "field": error.field, "line": row.number, "error": error.message}
    return {
        "prompt": None,
        "prompt_ids": None,
        "messages": None,
        "state": JobState.FAILED.value,
        "stop_reason": StopReason.ERROR.value,
        "error": error.message,
        "errors": [entry],
        "sent_at": None,
        "finished_at": now,
    }
