"""From the rows of a file to the jobs of a batch: in groups, each committed, so that it can be broken off.

Rows are entered in the order of the file. Submitting the file again skips those that are there and goes on;
two who submit it at once share the work, and no row is entered twice.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from nightmill.jobs.batch_status import BatchRecord
from nightmill.jobs.batches.grouping import Group, characters
from nightmill.jobs.contract import JobState, StopReason
from nightmill.jobs.errors import BatchFileError, BatchFileUnavailableError, InvalidRequestError
from nightmill.jobs.formats import InputFile, InputRow, RowError, rows_from
from nightmill.jobs.ids import IdSource
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.jobs import by_queue

OnRows = Callable[[int], None]
"""Called after each group with the number of rows read so far."""
Steps = Generator[int, None, int]
"""Yields after each row how many of those that were read are committed; returns how many the file has."""


class Submission:
    """Enters the rows of one batch.

    `defaults` hold if a row says nothing, and their model, if there is one, whatever a row says.
    `check_model` raises UnknownModelError for a name that no worker has.
    """

    def __init__(
        self,
        record: BatchRecord,
        defaults: JobSpec,
        *,
        max_attempts: int,
        check_model: Callable[[str], None],
    ) -> None:
        self._record = record
        self._defaults = replace(
            defaults, batch=record.name, scheduled_at=record.scheduled_at, deadline=record.deadline_at
        )
        self._max_attempts = max_attempts
        self._check_model = check_model
        self._models: dict[str, RowError | None] = {}
        self._ids = IdSource()
        self._announcing = True

    def steps(self, source: InputFile | Iterable[Any], store: BatchStore, announcer: Announcer) -> Steps:
        """Enter all rows that are not there yet, announce them, and mark the batch as complete.

        Raises BatchFileError if the file cannot be read, or changes meanwhile: then the batch is not
        complete, and all rows in it are of the file as it was at first.
        """
        if not isinstance(source, InputFile):
            return (yield from self._enter(rows_from(source, self._defaults), store, announcer))
        try:
            return (yield from self._enter(source.rows(self._defaults), store, announcer, source))
        except BatchFileUnavailableError:  # which says nothing of what it holds
            raise
        except BatchFileError as error:
            if source.changed():  # which explains whatever was wrong with it
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
        committed = 0
        group: Group[InputRow] = Group()

        def commit() -> None:
            nonlocal committed, group
            if source is not None and source.changed():
                raise self._changed(source)  # these rows may be of the new file
            now = store.database.now()
            jobs = [self._job(row, now) for row in group.rows if row.number > last]
            if jobs and store.insert_rows(name, jobs):
                # A broker that is away is asked once; workers find the rest in the table.
                self._announcing = self._announcing and announcer.announce(
                    by_queue(job for job in jobs if job["sent_at"])
                )
            committed += len(group.rows)
            group = Group()

        for row in rows:
            if group.add(row, characters(row.prompt)):
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
        return BatchFileError(
            f"{source.label}: changed while it was submitted, so batch {name!r} is not complete; its rows "
            "are of the file as it was: submit that once more, or delete the batch "
            f"(nightmill batch cancel {name}, nightmill batch delete {name}) and submit the file as it is now"
        )

    def _job(self, row: InputRow, now: datetime) -> dict[str, Any]:
        """The row of `jobs`. All have the same keys, so that they go into one statement."""
        spec, error = row.spec or self._defaults, row.error
        if self._defaults.model is not None and spec.model != self._defaults.model:
            spec = replace(spec, model=self._defaults.model)
        if error is None:
            error = self._model_error(spec.model)
        job = spec.row(self._ids.draw(), now, self._max_attempts) | {
            "row": row.number,
            "custom_id": row.custom_id,
            "stop_reason": None,
            "error": None,
            "errors": None,
            "finished_at": None,
            "cancel_requested_at": None,
        }
        if not self._announcing:
            job["sent_at"] = None
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


def _failed(row: InputRow, error: RowError, now: datetime) -> dict[str, Any]:
    """What makes a job of a bad row: final from the start, without a prompt."""
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
