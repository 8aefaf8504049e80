"""Statements about batches submitted over HTTP: entered, processed by one server at a time, ended.

Every step is a guarded UPDATE. A server holds a lease on the batch that it processes, and renews it; a server
that died or lost its lease changes nothing any more, and the next one repeats the step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import Connection, RowMapping, Table, case, delete, exists, func, literal, or_, select, update

from nightmill.jobs.base.contract import JobState, JsonObject
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.files import StoredFile, insert_files
from nightmill.jobs.sql.http_tables import OPEN, FileRow, HttpBatchRow
from nightmill.jobs.sql.jobs import UNFINISHED, dialect_insert
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import JobRow

BATCH_PREFIX = "batch_"
"""Prefix before the id in the name of the batch of jobs."""
HTTP_BATCHES = cast(Table, HttpBatchRow.__table__)
_NAMES = {column.key: "meta" if column.key == "metadata" else column.key for column in HTTP_BATCHES.columns}


class HttpStatus(StrEnum):
    """The status of a batch in OpenAI's words. The last four are final.

    validating    its file is read, and its rows are entered
    in_progress   all rows are entered
    finalizing    all rows have ended, and their results are written
    cancelling    somebody cancelled it; running rows end, and results are written
    completed     every row has ended
    failed        no row could be run, or its file could not be read to the end
    expired       the completion window ended some rows
    cancelled     cancelled, with the results until then
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """True if nothing more happens."""
        return self not in _OPEN


_OPEN = (HttpStatus.VALIDATING, HttpStatus.IN_PROGRESS, HttpStatus.FINALIZING, HttpStatus.CANCELLING)


@dataclass(frozen=True, slots=True)
class HttpBatch:
    """A batch submitted over HTTP."""

    id: str
    owner: str | None
    input_file: str
    created_at: datetime
    idempotency_key: str | None = None  # prefixed with its owner
    name: str | None = None
    endpoint: str | None = None  # required endpoint of all rows
    completion_window: str | None = None
    meta: JsonObject = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)  # defaults of its rows
    status: HttpStatus = HttpStatus.VALIDATING
    errors: list[Any] = field(default_factory=list)
    invalid: int | None = None  # rows that cannot be run; None until all are read
    total: int | None = None  # rows; these seven are None until the end
    completed: int | None = None
    failed: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of those of prompts
    reasoning_tokens: int | None = None  # of those of answers; of one that ended long ago not known
    output_file: str | None = None
    error_file: str | None = None
    scheduled_at: datetime | None = None
    deadline_at: datetime | None = None
    in_progress_at: datetime | None = None
    finalizing_at: datetime | None = None
    cancelling_at: datetime | None = None
    ended_at: datetime | None = None
    keeper: str | None = None
    kept_until: datetime | None = None
    attempts: int = 0  # attempts to read its file that killed a server or are under way
    note: str | None = None  # why it is delayed

    @property
    def broken(self) -> bool:
        """True if its file could not be read to the end: an error of the whole file has no line."""
        return any(isinstance(error, dict) and error.get("line") is None for error in self.errors)

    @property
    def batch(self) -> str:
        """The name of its batch of jobs."""
        return f"{BATCH_PREFIX}{self.id}"


_TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The end of a batch: its files (None for a file without rows) and its counts."""

    output: StoredFile | None
    errors: StoredFile | None
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


class HttpBatchStore:
    """The batches submitted over HTTP, in SQL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- for callers -----------------------------------------------------------------------------

    @retried
    def add(self, batch: HttpBatch) -> HttpBatch | None:
        """Insert a batch, or return the one with its idempotency key.

        Returns None if its file was deleted meanwhile.
        """
        with self.database.write() as connection:
            # Locked for this transaction: deleting a file checks for batches made from it.
            file = select(FileRow.id).where(FileRow.id == batch.input_file).with_for_update()
            there = connection.execute(file).one_or_none() is not None
            if there:
                values = asdict(batch)
                values["metadata"] = values.pop("meta")
                statement = dialect_insert(connection, HTTP_BATCHES).on_conflict_do_nothing(
                    index_elements=["idempotency_key"],
                    index_where=HttpBatchRow.idempotency_key.is_not(None),
                )
                connection.execute(statement, [values])
            if batch.idempotency_key is None:
                return batch if there else None
            return _find(connection, HttpBatchRow.idempotency_key == batch.idempotency_key)

    def with_key(self, idempotency_key: str) -> HttpBatch | None:
        """Return the batch with this idempotency key, if any."""
        with self.database.read() as connection:
            return _find(connection, HttpBatchRow.idempotency_key == idempotency_key)

    def get(self, batch_id: str) -> HttpBatch | None:
        """Return a batch; None if there is none with this id."""
        with self.database.read() as connection:
            return _find(connection, HttpBatchRow.id == batch_id)

    def page(
        self, *, owner: str | None, after: str | None, oldest_first: bool, limit: int
    ) -> list[HttpBatch]:
        """Return batches in the order of their ids, which is that of creation. `owner` None: everybody's."""
        query = select(HTTP_BATCHES)
        if owner is not None:
            query = query.where(HttpBatchRow.owner == owner)
        if after is not None:
            query = query.where(HttpBatchRow.id > after if oldest_first else HttpBatchRow.id < after)
        query = query.order_by(HttpBatchRow.id if oldest_first else HttpBatchRow.id.desc()).limit(limit)
        with self.database.read() as connection:
            return [_batch(row) for row in connection.execute(query).mappings()]

    def count_open(self, owner: str | None) -> int:
        """Count the unfinished batches of an owner."""
        of_owner = HttpBatchRow.owner.is_(None) if owner is None else HttpBatchRow.owner == owner
        query = select(func.count()).select_from(HttpBatchRow).where(OPEN, of_owner)
        with self.database.read() as connection:
            return connection.execute(query).scalar_one()

    def cancel(self, batch_id: str) -> bool:
        """Request cancellation of a batch; returns False if it is too late for that."""
        asked = (HttpStatus.VALIDATING, HttpStatus.IN_PROGRESS)
        return self._change(
            batch_id, asked, {"status": HttpStatus.CANCELLING, "cancelling_at": self.database.now()}
        )

    def reopen(self, batch_id: str) -> bool:
        """Reopen a batch whose rows were queued again; its files will be written anew at the end.

        Returns False if the batch was already open.
        """
        written = (
            *(HttpStatus.FINALIZING, HttpStatus.COMPLETED),
            *(HttpStatus.FAILED, HttpStatus.EXPIRED, HttpStatus.CANCELLED),
        )
        outcome = (
            *("total", "completed", "failed", *_TOKENS),
            *("output_file", "error_file", "finalizing_at", "cancelling_at", "ended_at", "deadline_at"),
        )
        values: dict[str, Any] = {"status": HttpStatus.IN_PROGRESS} | dict.fromkeys(outcome)
        return self._change(batch_id, written, values | _LET_GO)

    # -- for servers that work on them -----------------------------------------------------------

    def open(self) -> list[HttpBatch]:
        """Return all unfinished batches, oldest first."""
        query = select(HTTP_BATCHES).where(OPEN).order_by(HttpBatchRow.id)
        with self.database.read() as connection:
            return [_batch(row) for row in connection.execute(query).mappings()]

    def over(self) -> set[str]:
        """Return ids of batches in progress whose rows have all ended, with one statement for all."""
        going = exists().where(
            JobRow.batch == literal(BATCH_PREFIX) + HttpBatchRow.id, JobRow.state.in_(UNFINISHED)
        )
        query = select(HttpBatchRow.id).where(
            OPEN, HttpBatchRow.status == str(HttpStatus.IN_PROGRESS), ~going
        )
        with self.database.read() as connection:
            return set(connection.execute(query).scalars())

    def claim(self, batch: HttpBatch, keeper: str, duration: timedelta) -> bool:
        """Take or renew the lease of a batch in the status seen before; returns True on success."""
        now = self.database.now()
        values = {"keeper": keeper, "kept_until": now + duration}
        return self._change(batch.id, (batch.status,), values, _free(keeper, now, duration))

    def attempt(self, batch: HttpBatch, keeper: str, duration: timedelta, known: int = 0) -> int | None:
        """Take the lease of a batch to read its file, and count the attempt first; None if it is taken.

        Returns the number of earlier attempts that never ended, since their servers died. That is `known` if
        this server still holds the lease, even if it could not undo its count.
        """
        now = self.database.now()
        mine = HttpBatchRow.keeper == keeper
        counted = case((mine, literal(known + 1)), else_=HttpBatchRow.attempts + 1)
        values = {"keeper": keeper, "kept_until": now + duration, "attempts": counted}
        return self._attempt(batch, values, _free(keeper, now, duration))

    def hold(self, batch: HttpBatch, keeper: str, duration: timedelta, **values: Any) -> bool:
        """Renew a lease; returns False if another server took it or the status changed since.

        `values` are further columns to write.
        """
        values |= {"kept_until": self.database.now() + duration}
        return self._change(batch.id, (batch.status,), values, HttpBatchRow.keeper == keeper)

    def release(self, batch: HttpBatch, keeper: str, **values: Any) -> bool:
        """Release the lease of a batch to be continued later; `values` are further columns to write."""
        return self._change(batch.id, (batch.status,), _LET_GO | values, HttpBatchRow.keeper == keeper)

    @retried
    def _attempt(self, batch: HttpBatch, values: Mapping[str, Any], condition: Any) -> int | None:
        statement = update(HttpBatchRow).where(
            HttpBatchRow.id == batch.id, HttpBatchRow.status == str(batch.status), condition
        )
        with self.database.write() as connection:
            counted = statement.values(**values).returning(HttpBatchRow.attempts)
            found: int | None = connection.execute(counted).scalar_one_or_none()
        return None if found is None else found - 1

    def begin(self, batch: HttpBatch, keeper: str, invalid: int, errors: list[Any]) -> bool:
        """Record that all rows are entered, `invalid` of which cannot be run; `errors` describes the first of
        these."""
        values = {
            "status": HttpStatus.IN_PROGRESS,
            "in_progress_at": self.database.now(),
            "invalid": invalid,
            "errors": errors,
            "attempts": 0,
        }
        return self._change(batch.id, (batch.status,), values | _LET_GO, HttpBatchRow.keeper == keeper)

    def break_off(self, batch: HttpBatch, keeper: str, invalid: int, errors: list[Any]) -> bool:
        """Record that the file cannot be read further; results of the entered rows will be written.

        `errors` has one for the whole file, and those of the first of `invalid` rows.
        """
        values = {
            "status": HttpStatus.FINALIZING,
            "finalizing_at": self.database.now(),
            "invalid": invalid,
            "errors": errors,
            "attempts": 0,
        }
        return self._change(batch.id, (batch.status,), values | _LET_GO, HttpBatchRow.keeper == keeper)

    def finalize(self, batch: HttpBatch) -> bool:
        """Record that all rows have ended."""
        values = {"status": HttpStatus.FINALIZING, "finalizing_at": self.database.now()}
        return self._change(batch.id, (batch.status,), values | _LET_GO)

    @retried
    def end(self, batch: HttpBatch, keeper: str, status: HttpStatus, outcome: BatchOutcome) -> bool:
        """End a batch whose files are written, and insert these, in one transaction."""
        files = [file for file in (outcome.output, outcome.errors) if file is not None]
        values = {
            "status": status,
            "ended_at": self.database.now(),
            "output_file": outcome.output and outcome.output.id,
            "error_file": outcome.errors and outcome.errors.id,
            "total": outcome.total,
            "completed": outcome.completed,
            "failed": outcome.failed,
        } | {name: getattr(outcome, name) for name in _TOKENS}
        of_keeper = HttpBatchRow.keeper == keeper
        with self.database.write() as connection:
            if not _update(connection, batch.id, (batch.status,), values | _LET_GO, of_keeper):
                return False
            if files:
                insert_files(connection, files)
        return True

    def fail(self, batch: HttpBatch, keeper: str, status: HttpStatus, errors: list[Any]) -> bool:
        """End a batch without results; returns False if this server has lost its lease."""
        values = {"status": status, "ended_at": self.database.now(), "errors": errors}
        values |= dict.fromkeys(("total", "completed", "failed", *_TOKENS, "invalid", "attempts"), 0)
        return self._change(batch.id, (batch.status,), values | _LET_GO, HttpBatchRow.keeper == keeper)

    @retried
    def forget(self, before: datetime) -> None:
        """Delete batches that ended before this moment. Their rows, which are jobs, stay."""
        with self.database.write() as connection:
            connection.execute(delete(HttpBatchRow).where(HttpBatchRow.ended_at < before))

    @retried
    def let_go(self, keeper: str) -> None:
        """Release all leases of `keeper`."""
        with self.database.write() as connection:
            statement = update(HttpBatchRow).where(OPEN, HttpBatchRow.keeper == keeper)
            connection.execute(statement.values(keeper=None, kept_until=None))

    def bad_rows(self, batch: HttpBatch, most: int) -> tuple[int, list[tuple[int, JsonObject]]]:
        """Return the number of rows that cannot be run, and (line, error) of the first ones."""
        bad = (
            JobRow.batch == batch.batch,
            JobRow.state == JobState.FAILED,
            JobRow.prompt.is_(None),
            JobRow.messages.is_(None),
            JobRow.prompt_ids.is_(None),
        )
        with self.database.read() as connection:
            number = connection.execute(select(func.count()).select_from(JobRow).where(*bad)).scalar_one()
            query = select(JobRow.row, JobRow.errors).where(*bad).order_by(JobRow.row).limit(most)
            found = connection.execute(query).all() if number else []
        return number, [(row.row, (row.errors or [{}])[-1]) for row in found]

    @retried
    def _change(
        self, batch_id: str, statuses: Iterable[HttpStatus], values: Mapping[str, Any], *conditions: Any
    ) -> bool:
        with self.database.write() as connection:
            return _update(connection, batch_id, statuses, values, *conditions)


_LET_GO: dict[str, Any] = {"keeper": None, "kept_until": None, "note": None}
"""Columns at the end of a step: no lease, and no note about a failed step."""


def _free(keeper: str, now: datetime, duration: timedelta) -> Any:
    """Return the condition that this server may take the lease."""
    return or_(
        HttpBatchRow.keeper.is_(None),
        HttpBatchRow.keeper == keeper,
        HttpBatchRow.kept_until < now,
        # Further ahead than any lease: the clock was set back. A live holder renews its lease.
        HttpBatchRow.kept_until > now + 2 * duration,
    )


def _update(
    connection: Connection,
    batch_id: str,
    statuses: Iterable[HttpStatus],
    values: Mapping[str, Any],
    *conditions: Any,
) -> bool:
    of_status = HttpBatchRow.status.in_([str(status) for status in statuses])
    statement = update(HttpBatchRow).where(HttpBatchRow.id == batch_id, of_status, *conditions)
    return connection.execute(statement.values(**values)).rowcount == 1


def _find(connection: Connection, condition: Any) -> HttpBatch | None:
    row = connection.execute(select(HTTP_BATCHES).where(condition)).mappings().one_or_none()
    return None if row is None else _batch(row)


def _batch(row: RowMapping) -> HttpBatch:
    values = {name: row[key] for key, name in _NAMES.items()}
    return HttpBatch(**values | {"status": HttpStatus(row["status"])})
