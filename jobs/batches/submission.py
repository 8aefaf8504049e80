"""From the rows of a file to the jobs of a batch: in groups, each committed, so that it can be broken off.

Rows are entered in the order of the file. Submitting the file again skips those that are there and goes on;
two who submit it at once share the work, and no row is entered twice.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from nightmill.jobs.batch_status import BatchRecord
from nightmill.jobs.batches.grouping import characters, grouped
from nightmill.jobs.contract import GenerationParams, JobState, StopReason
from nightmill.jobs.errors import BatchFileError, InvalidRequestError
from nightmill.jobs.formats import InputFile, InputRow, RowCode, RowError, rows_from
from nightmill.jobs.ids import IdSource
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.requests import OPTIONS, PARAMETERS, Options, build_row
from nightmill.jobs.sql.batches import BatchStore

OnRows = Callable[[int], None]
"""Called after each group with the number of rows read so far."""


class Submission:
    """Enters the rows of one batch.

    `params` and `options` hold where a row says nothing; `model`, where given, holds whatever a row says.
    `check_model` raises UnknownModelError for a name that no worker has.
    """

    def __init__(
        self,
        record: BatchRecord,
        params: GenerationParams,
        options: Options,
        *,
        max_attempts: int,
        check_model: Callable[[str], None],
    ) -> None:
        self._record = record
        self._params = params
        self._defaults = params.model_dump(exclude_unset=True)
        self._options = replace(
            options, batch=record.name, scheduled_at=record.scheduled_at, deadline=record.deadline_at
        )
        self._max_attempts = max_attempts
        self._check_model = check_model
        self._models: dict[str, RowError | None] = {}
        self._ids = IdSource()

    def run(
        self,
        source: InputFile | Iterable[Any],
        store: BatchStore,
        announcer: Announcer,
        on_rows: OnRows | None = None,
    ) -> int:
        """Enter all rows that are not there yet, announce them, and mark the batch as complete.

        Returns the number of rows of the file. Raises BatchFileError where it cannot be read, or changes
        meanwhile: then the batch is not complete, and all rows in it are of the file as it was at first.
        """
        if not isinstance(source, InputFile):
            return self._enter(rows_from(source), store, announcer, on_rows)
        try:
            return self._enter(source.rows(), store, announcer, on_rows, source)
        except BatchFileError as error:
            if source.changed():  # which explains whatever was wrong with it
                raise self._changed(source) from error
            raise

    def _enter(
        self,
        rows: Iterable[InputRow],
        store: BatchStore,
        announcer: Announcer,
        on_rows: OnRows | None,
        source: InputFile | None = None,
    ) -> int:
        name = self._record.name
        last = store.last_row(name)
        read = 0
        announcing = True
        for group in grouped(rows, lambda row: characters(row.prompt)):
            read += len(group)
            if source is not None and source.changed():
                raise self._changed(source)  # these rows may be of the new file
            now = store.database.now()
            jobs = [self._job(row, now, announcing) for row in group if row.number > last]
            if jobs and store.insert_rows(name, jobs):
                # A broker that is away is asked once; workers find the rest in the table.
                announcing = announcing and announcer.announce(_to_announce(jobs))
            if on_rows is not None:
                on_rows(read)
        if source is not None and source.changed(self._record.fingerprint):
            raise self._changed(source)
        store.complete(name, read)
        return read

    def _changed(self, source: InputFile) -> BatchFileError:
        name = self._record.name
        return BatchFileError(
            f"{source.path}: changed while it was submitted, so batch {name!r} is not complete; its rows are "
            "of the file as it was: submit that once more, or delete the batch "
            f"(nightmill batch cancel {name}, nightmill batch delete {name}) and submit the file as it is now"
        )

    def _job(self, row: InputRow, now: datetime, announcing: bool) -> dict[str, Any]:
        """The row of `jobs`. All have the same keys, so that they go into one statement."""
        params, options, error = self._params, self._options, row.error
        if error is None:
            params, options = self._merged(row)
            error = self._model_error(options.model)
        prompt = "bad" if error is not None or row.prompt is None else row.prompt
        job = build_row(self._ids.draw(), prompt, params, options, now, self._max_attempts) | {
            "row": row.number,
            "custom_id": row.custom_id,
            "stop_reason": None,
            "error": None,
            "errors": None,
            "finished_at": None,
            "cancel_requested_at": None,
        }
        if not announcing:
            job["sent_at"] = None
        return job if error is None else job | _failed(row, error, now)

    def _merged(self, row: InputRow) -> tuple[GenerationParams, Options]:
        params, options = self._params, self._options
        own = {name: value for name, value in row.settings.items() if name in PARAMETERS}
        if own:
            params = GenerationParams.parse(self._defaults | own)
        more = {name: value for name, value in row.settings.items() if name in OPTIONS}
        if self._options.model is not None:
            more.pop("model", None)
        return params, replace(options, **more) if more else options

    def _model_error(self, model: str | None) -> RowError | None:
        if model is None or model == self._options.model:
            return None
        if model not in self._models:
            self._models[model] = None
            try:
                self._check_model(model)
            except InvalidRequestError as error:
                self._models[model] = RowError(RowCode.INVALID_VALUE.value, str(error), "model")
        return self._models[model]


def _failed(row: InputRow, error: RowError, now: datetime) -> dict[str, Any]:
    """What makes a job of a bad row: final from the start, without a prompt."""
    entry = {"code": error.code, "field": error.field, "line": row.number, "error": error.message}
    return {
        "prompt": None,
        "messages": None,
        "state": JobState.FAILED.value,
        "stop_reason": StopReason.ERROR.value,
        "error": error.message,
        "errors": [entry],
        "sent_at": None,
        "finished_at": now,
    }


def _to_announce(jobs: Iterable[Mapping[str, Any]]) -> dict[tuple[str | None, int], list[str]]:
    groups: dict[tuple[str | None, int], list[str]] = {}
    for job in jobs:
        if job["sent_at"] is not None:
            groups.setdefault((job["model"], job["priority"]), []).append(job["id"])
    return groups
