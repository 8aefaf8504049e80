"""Batches as programs see them: submit a file or an iterable, look, wait, read, change one's mind.

batch = jobs.submit_batch("prompts.jsonl", name="tonight", max_tokens=256, deadline=six_in_the_morning)
print(batch.wait().state)
for job in batch.results():
    print(job.custom_id, job.text)
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from nightmill.jobs.batch_status import BatchRecord, BatchStatus, make_status
from nightmill.jobs.batches.result_files import output_row, source_of, vet, write_in_order
from nightmill.jobs.batches.submission import OnRows, Submission
from nightmill.jobs.contract import JobState, JsonObject
from nightmill.jobs.errors import (
    BatchConflictError,
    BatchNotFoundError,
    InvalidParameterError,
    WaitTimeoutError,
)
from nightmill.jobs.fields import OF_A_BATCH, deadline_moment, moment
from nightmill.jobs.formats import Destination, FileFormat, InputFile
from nightmill.jobs.formats.frames import Prompts, arrow_table, items_of, pandas_frame
from nightmill.jobs.formats.places import OnThisDisk, Place
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.formats.results import ERROR_COLUMNS, RESULT_COLUMNS
from nightmill.jobs.ids import IdSource
from nightmill.jobs.job import Job
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.settings import Settings
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.sql.workers import WorkerStore
from nightmill.jobs.waiting import in_time

_OF_CHATS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_KEPT = ("priority", "max_attempts", *_OF_CHATS)  # of a batch's settings, beside parameters
_POLL_SECONDS = 0.5
_POLL_SHARE = 10  # a look at a huge batch takes a while; then look less often, a tenth of the time at most

BatchSource = str | Path | InputFile | Prompts


class Batch:
    """A submitted batch. It holds no connection of its own and nothing that grows with the rows."""

    def __init__(self, record: BatchRecord, store: BatchStore, announcer: Announcer) -> None:
        self.name = record.name
        self.record = record
        self.store = store
        self._announcer = announcer

    def __repr__(self) -> str:
        return f"<batch {self.name!r}>"

    @property
    def format(self) -> FileFormat:
        """The format of its results."""
        return FileFormat(self.record.format) if self.record.format else FileFormat.JSONL

    def status(self, *, errors: bool = True, whole_pace: bool | None = None) -> BatchStatus:
        """Where it stands. `errors`: also group the errors, which reads the failed rows.

        whole_pace  of an ended batch also say how fast it was, which reads all its rows; by default as
                    `errors`. Without both only indexes are read
        """
        record = self.store.get(self.name)
        counts = self.store.counts(self.name)
        pace = self.store.recent_pace(self.name)
        groups = self.store.error_groups(self.name) if errors else []
        now = self.store.database.now()
        served = pace is None or bool(WorkerStore(self.store.database).serving(record.model))
        status = make_status(record, counts, pace, groups, now, served=served)
        if not status.state.final:
            return status
        asked = errors if whole_pace is None else whole_pace
        whole = self.store.whole_pace(self.name) if asked else None
        return make_status(record, counts, whole, groups, now)

    def wait(
        self,
        *,
        timeout: float | None = None,
        on_status: Callable[[BatchStatus], object] = lambda status: None,
    ) -> BatchStatus:
        """Return its status once its state is final. `on_status` is called with every status looked at.

        Raises WaitTimeoutError after `timeout` seconds; the rows go on.
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
        """The rows that have succeeded so far, in the order of the file."""
        return self.store.in_order(self.name, [JobState.SUCCEEDED])

    def errors(self) -> Iterator[Job]:
        """The rows that have ended without a (whole) result so far, in the order of the file."""
        return self.store.in_order(self.name, [JobState.FAILED, JobState.CANCELLED])

    def to_arrow(self, *, errors: bool = False) -> Any:
        """The rows that have succeeded so far as a pyarrow.Table, with the columns of a result file.

        With `errors` those that have ended without a result. Raises MissingExtraError without pyarrow.
        """
        return arrow_table(*self._rows_and_columns(errors))

    def to_pandas(self, *, errors: bool = False) -> Any:
        """As `to_arrow`, as a pandas.DataFrame; raises MissingExtraError without pandas."""
        return pandas_frame(*self._rows_and_columns(errors))

    def write_results(
        self, path: str | Path, *, overwrite: bool = False, on_rows: OnRows | None = None
    ) -> int:
        """Write the rows that have succeeded so far to a file in the batch's format; returns how many.

        The file appears when it is complete. One that is there is replaced if it holds results of this
        batch and nothing else, any other with `overwrite` only, and the batch's input never. Raises
        BatchFileError.
        """
        return self.write_to(OnThisDisk(path), errors=False, overwrite=overwrite, on_rows=on_rows)

    def write_errors(
        self, path: str | Path, *, overwrite: bool = False, on_rows: OnRows | None = None
    ) -> int:
        """As `write_results`, for the rows that have ended without a (whole) result."""
        return self.write_to(OnThisDisk(path), errors=True, overwrite=overwrite, on_rows=on_rows)

    def write_to(self, place: Place, *, errors: bool, overwrite: bool, on_rows: OnRows | None) -> int:
        """As `write_results`, or `write_errors`, to where a place is; it is not delivered."""
        apart = source_of(self.record.source)
        with Destination(
            place.path,
            self.format,
            errors=errors,
            overwrite=overwrite,
            apart_from=apart,
            label=place.label,
        ) as file:
            vet(file, self.store, self.name, self.record.fingerprint)
            jobs = self.errors() if errors else self.results()
            return write_in_order(file, jobs, self.format, errors=errors, on_rows=on_rows)

    def cancel(self) -> tuple[int, int]:
        """Cancel all rows that are not final: (cancelled now, running and asked to stop).

        Running rows stop within a second, and keep the text that they have.
        """
        return self.store.cancel(self.name)

    def retry_failed(self, *, deadline: datetime | timedelta | None = None) -> int:
        """Queue the rows again that failed, expired or were cancelled; returns how many.

        They keep their ids and seeds. Rows that succeeded, and bad rows of the file, are left alone. Raises
        BatchConflictError if the batch is being deleted.
        """
        ends_at = deadline_moment(deadline, self.store.database.now())
        queued = 0
        for groups in self.store.retry_failed(self.name, ends_at):
            queued += sum(map(len, groups.values()))
            self._announcer.announce(groups)
        return queued

    def delete(self, on_rows: OnRows | None = None) -> int:
        """Delete it and its rows, whatever they hold; returns how many rows there were.

        From the first row on it takes neither rows nor retries; what was broken off goes on at the next call.
        Raises InvalidTransitionError while rows are not final.
        """
        gone = 0
        for gone in Deletion(self.store.database).run(self.name):
            if on_rows is not None:
                on_rows(gone)
        return gone

    def _rows_and_columns(self, errors: bool) -> tuple[Iterator[JsonObject], Mapping[str, str]]:
        jobs = self.errors() if errors else self.results()
        rows = (output_row(job, FileFormat.PARQUET, errors=errors) for job in jobs)
        return rows, ERROR_COLUMNS if errors else RESULT_COLUMNS


class Batches:
    """The batches of one database."""

    def __init__(self, store: BatchStore, announcer: Announcer, settings: Settings) -> None:
        self.store = store
        self._announcer = announcer
        self._settings = settings

    def get(self, name: str) -> Batch:
        """A batch; raises BatchNotFoundError."""
        return Batch(self.store.get(name), self.store, self._announcer)

    def running(self, limit: int) -> list[Batch]:
        """Batches of which rows are running, newest first."""
        return [Batch(record, self.store, self._announcer) for record in self.store.running(limit)]

    def newest(self, limit: int) -> list[Batch]:
        """The newest batches, newest first."""
        return [Batch(record, self.store, self._announcer) for record in self.store.newest(limit)]

    def submit(
        self,
        source: BatchSource,
        settings: Mapping[str, Any],
        *,
        name: str | None,
        check_model: Callable[[str], None],
        on_rows: OnRows | None = None,
        outputs: Sequence[Destination] = (),
        on_entered: Callable[[str], object] = lambda name: None,
    ) -> Batch:
        """See Client.submit_batch. `check_model` raises UnknownModelError.

        `on_entered` is told its name once it is there, before its rows are. `outputs` are refused, before
        anything is entered, if they hold anything but rows of this batch.
        """
        steps = self.submitting(
            source, settings, name=name, check_model=check_model, outputs=outputs, on_entered=on_entered
        )
        committed = 0
        while True:
            try:
                now = next(steps)
            except StopIteration as end:
                batch: Batch = end.value
                return batch
            if on_rows is not None and now > committed:
                on_rows(now)
            committed = now

    def submitting(
        self,
        source: BatchSource,
        settings: Mapping[str, Any],
        *,
        name: str | None,
        check_model: Callable[[str], None],
        outputs: Sequence[Destination] = (),
        on_entered: Callable[[str], object] = lambda name: None,
    ) -> Generator[int, None, Batch]:
        """As `submit`, in small steps; yields how many rows of those that were read are committed."""
        if isinstance(source, str | Path):
            source = InputFile(source)
        elif not isinstance(source, InputFile):
            source = items_of(source, ROW_KEYS)
        defaults = JobSpec.defaults(settings, OF_A_BATCH).updated({"batch": name})
        if defaults.model is not None:
            check_model(defaults.model)
        fingerprint: str | None = None
        if isinstance(source, InputFile):
            fingerprint = yield from _hashed(source)
        record = self._record(source, defaults, settings, fingerprint)
        self._check_times(record)
        for output in outputs:
            vet(output, self.store, record.name, record.fingerprint)
        known, created = self.store.enter(record)
        if not created:
            _check_same(record, known)
        on_entered(known.name)
        batch = Batch(known, self.store, self._announcer)
        if known.row_count is None:
            submission = Submission(
                known, defaults, max_attempts=self._settings.max_attempts, check_model=check_model
            )
            yield from submission.steps(source, self.store, self._announcer)
            batch.record = self.store.get(known.name)
        return batch

    def _record(
        self,
        source: InputFile | Iterator[Any],
        defaults: JobSpec,
        settings: Mapping[str, Any],
        fingerprint: str | None,
    ) -> BatchRecord:
        now = self.store.database.now()
        said = {name for name, value in settings.items() if value is not None}
        kept = defaults.params.model_dump(mode="json", include=said)
        kept |= {name: settings[name] for name in _KEPT if name in said}
        if defaults.constrained is not None:
            kept["constrained"] = defaults.constrained.values()
        if defaults.tools is not None:
            kept["tools"] = defaults.tools.values()
        if isinstance(source, InputFile):
            name = defaults.batch or _file_name(source, str(fingerprint), defaults.model, kept)
            format, path = source.format, source.label
        else:
            path = ""
            name = defaults.batch or f"batch-{IdSource().draw()}"
            format = FileFormat.JSONL
        return BatchRecord(
            name=name,
            model=defaults.model,
            created_at=now,
            format=str(format),
            source=path or None,
            fingerprint=fingerprint,
            settings=kept,
            scheduled_at=moment("scheduled_at", defaults.scheduled_at, now),
            deadline_at=moment("deadline", defaults.deadline, now),
        )

    def _check_times(self, record: BatchRecord) -> None:
        """Refuse a deadline that no row could meet, but not for a batch that is there: it keeps its times."""
        begins, ends = record.scheduled_at, record.deadline_at
        try:
            deadline_moment(ends, record.created_at)
            if begins is not None and ends is not None and ends <= begins:
                raise InvalidParameterError(
                    f"deadline: {ends.isoformat()} is not after the time at which the batch begins, "
                    f"{begins.isoformat()}",
                    field="deadline",
                )
        except InvalidParameterError:
            with suppress(BatchNotFoundError):
                self.store.get(record.name)
                return
            raise


def _hashed(source: InputFile) -> Generator[int, None, str]:
    """The fingerprint of a file, of which no row is committed meanwhile."""
    hashing = source.hashing()
    while True:
        try:
            next(hashing)
        except StopIteration as end:
            fingerprint: str = end.value
            return fingerprint
        yield 0


def _file_name(file: InputFile, fingerprint: str, model: str | None, settings: Mapping[str, Any]) -> str:
    """The name of a file's batch if none is given: the same for the same rows, model and settings."""
    content = json.dumps([fingerprint, model, settings], sort_keys=True)
    stem = re.sub(r"[^\w.-]+", "-", file.path.name.partition(".")[0])[:100] or "batch"
    return f"{stem}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _check_same(wanted: BatchRecord, known: BatchRecord) -> None:
    """Refuse to mix what is to be submitted with a batch that is there; BatchConflictError names the part."""
    if wanted.fingerprint is None or known.fingerprint is None:
        raise BatchConflictError(
            f"name: there is a batch {known.name!r} already, and only files can be submitted again: choose "
            "another name, or delete it first",
            field="name",
        )
    differences = {
        "content of the file": wanted.fingerprint != known.fingerprint,
        "model": wanted.model != known.model,
        "settings": wanted.settings != known.settings,
    }
    if different := [part for part, differs in differences.items() if differs]:
        raise BatchConflictError(
            f"name: batch {known.name!r} was submitted with other {' and '.join(different)} "
            f"({known.source}): choose another name, or delete it first",
            field="name",
        )
