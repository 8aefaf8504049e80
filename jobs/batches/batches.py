"""The batches of a database: submit a file or an iterable, find what was submitted."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.stepping import exhaust
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.limits import change_limits, columns_of, differ
from nightmill.jobs.batches.result_files import vet
from nightmill.jobs.batches.sameness import batch_name, check_same, file_batch_name
from nightmill.jobs.batches.submission import OnRows, Submission
from nightmill.jobs.errors import (
    BatchNotFoundError,
    DatabaseError,
    InvalidParameterError,
)
from nightmill.jobs.formats import Destination, FileFormat, InputFile
from nightmill.jobs.formats.frames import Prompts, items_of
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.formats.together import open_input
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.request.fields import OF_A_BATCH, deadline_moment, moment
from nightmill.jobs.request.limits import Limits, without_limits
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.tables.columns import Table
from nightmill.jobs.tables.following import FollowingRows
from nightmill.jobs.tables.memory import TableItems
from nightmill.jobs.tables.options import TableOptions, without_table
from nightmill.jobs.tables.reading import TableFile
from nightmill.jobs.tables.together import TableSource, table_source

_OF_CHATS = ("reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_KEPT = ("priority", "max_attempts", *_OF_CHATS)  # stored settings besides parameters

BatchSource = str | Path | InputFile | TableItems | Prompts
Source = BatchSource | FollowingRows | None
"""A source of rows; None for rows that follow those of another batch."""


class Batches:
    """The batches of one database."""

    def __init__(self, store: BatchStore, announcer: Announcer, settings: Settings) -> None:
        self.store = store
        self._announcer = announcer
        self._settings = settings

    def get(self, name: str) -> Batch:
        """Return a batch; raises BatchNotFoundError."""
        return Batch(self.store.get(name), self.store, self._announcer)

    def running(self, limit: int) -> list[Batch]:
        """Return batches with running rows, newest first."""
        return [Batch(record, self.store, self._announcer) for record in self.store.running(limit)]

    def newest(self, limit: int) -> list[Batch]:
        """Return the newest batches, newest first."""
        return [Batch(record, self.store, self._announcer) for record in self.store.newest(limit)]

    def submit(
        self,
        source: Source,
        settings: Mapping[str, Any],
        *,
        name: str | None,
        check_model: Callable[[str], None],
        on_rows: OnRows | None = None,
        outputs: Sequence[Destination] = (),
        on_entered: Callable[[str], object] = lambda name: None,
    ) -> Batch:
        """Submit a batch; see Client.submit_batch. `check_model` raises UnknownModelError.

        `on_entered` is called with the batch's name before its rows are entered. `outputs` that contain
        anything but rows of this batch are refused before anything is entered.
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
        source: Source,
        settings: Mapping[str, Any],
        *,
        name: str | None,
        check_model: Callable[[str], None],
        outputs: Sequence[Destination] = (),
        on_entered: Callable[[str], object] = lambda name: None,
        asker: str | None = None,
    ) -> Generator[int, None, Batch]:
        """Submit a batch in small steps; yields the number of read rows that are committed.

        asker  the name of the key that it came with over HTTP
        """
        limits = Limits.of(settings)
        settings = without_limits(settings)
        table: Table | None = None
        if (options := TableOptions.of(settings)) is not None:
            made = self._table(source, options)
            source, table = made, made.table
        elif source is None:
            raise InvalidParameterError("source: is missing; give a file, a table, rows, or after=BATCH")
        elif isinstance(source, str | Path):
            source = open_input(source)
        elif not isinstance(source, InputFile | TableItems | FollowingRows):
            source = items_of(source, ROW_KEYS)
        settings = without_table(settings)  # without a template they are None or False, if they are there
        defaults = JobSpec.defaults(settings, OF_A_BATCH).updated({"batch": name}, {"asker": asker})
        if defaults.model is not None:
            check_model(defaults.model)
        fingerprint: str | None = None
        if isinstance(source, InputFile):
            fingerprint = yield from _hashed(source)
        elif isinstance(source, FollowingRows):
            fingerprint = source.fingerprint
        record = self._record(source, defaults, settings, fingerprint, table)
        record = replace(record, **columns_of(limits))
        self._check_times(record)
        for output in outputs:
            vet(output, self.store, record.name, record.fingerprint)
        known, created = self.store.enter(record)
        if not created:
            check_same(record, known)
            if differ(limits, known):  # given anew, they are raised or lowered
                change_limits(self.store, self._announcer, known.name, limits)
        batch = Batch(known, self.store, self._announcer)
        submission = Submission(
            known,
            defaults,
            max_attempts=self._settings.max_attempts,
            shard_size=self._settings.shard_size,
            check_model=check_model,
        )
        try:
            on_entered(known.name)
            if known.row_count is None:
                yield from submission.steps(source, self.store, self._announcer)
                batch.renamed = submission.renamed
                batch.record = self.store.get(known.name)
        except Exception:  # whatever it is: it goes on, and a batch that is half there would stand in the way
            if created:
                with suppress(DatabaseError):  # unreachable: repeating the call resumes
                    Deletion(self.store.database).withdraw(known.name)
            raise
        return batch

    def _table(self, source: Any, options: TableOptions) -> TableSource | FollowingRows:
        if options.after is None:
            return table_source(source, options)
        if isinstance(source, FollowingRows):
            return source
        if source is not None:
            raise InvalidParameterError(
                "after: the rows are those of that batch; leave out the file",
                field="after",
            )
        return FollowingRows(self.store, options)

    def name_of(self, source: InputFile | FollowingRows, settings: Mapping[str, Any]) -> str:
        """Return the name that the batch of these rows gets by default."""
        known = source.fingerprint if isinstance(source, FollowingRows) else None
        fingerprint = known or exhaust(_hashed(cast(InputFile, source)))
        table = source.table if isinstance(source, TableFile | FollowingRows) else None
        settings = without_table(without_limits(settings))
        defaults = JobSpec.defaults(settings, OF_A_BATCH)
        return self._record(source, defaults, settings, fingerprint, table).name

    def _record(
        self,
        source: InputFile | TableItems | FollowingRows | Iterator[Any],
        defaults: JobSpec,
        settings: Mapping[str, Any],
        fingerprint: str | None,
        table: Table | None,
    ) -> BatchRecord:
        now = self.store.database.now()
        said = {name for name, value in settings.items() if value is not None}
        stored = defaults.params.model_dump(mode="json", include=said)
        stored |= {name: settings[name] for name in _KEPT if name in said}
        if defaults.constrained is not None:
            stored["constrained"] = defaults.constrained.values()
        if defaults.tools is not None:
            stored["tools"] = defaults.tools.values()
        if table is not None:
            stored |= table.settings()
        if isinstance(source, InputFile | FollowingRows):
            stored |= source.dialect.settings()
        if isinstance(source, InputFile):
            name = defaults.batch or file_batch_name(source, str(fingerprint), defaults.model, stored)
            format, path = source.format, source.label
        elif isinstance(source, FollowingRows):
            name = defaults.batch or batch_name(source.after, source.fingerprint, defaults.model, stored)
            format, path = source.format, ""
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
            settings=stored,
            scheduled_at=moment("scheduled_at", defaults.scheduled_at, now),
            deadline_at=moment("deadline", defaults.deadline, now),
        )

    def _check_times(self, record: BatchRecord) -> None:
        """Refuse a deadline that no row could meet, unless the batch exists and keeps its times."""
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
    """Compute the fingerprint of a file in steps, unless it is known; yields 0 committed rows."""
    if source.taken is not None and not source.changed():
        return source.taken
    hashing = source.hashing()
    while True:
        try:
            next(hashing)
        except StopIteration as end:
            fingerprint: str = end.value
            return fingerprint
        yield 0
