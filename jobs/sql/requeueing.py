"""Statements that queue ended rows of a batch again with other parameters, under their ids.

Each row keeps in `history` what it was: the parameters that changed, how it ended, and a digest of its text.
Every update is guarded by the state and attempt that were read.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.history import EXTEND, RETRY, former
from nightmill.jobs.request.parameters import MAX_SEED, GenerationParams
from nightmill.jobs.request.reuse import content_key, realm_in, realm_of
from nightmill.jobs.request.stored_parameters import stored
from nightmill.jobs.sql import answers, followers, logprobs, partials
from nightmill.jobs.sql.batches import UNSUCCESSFUL, BatchStore
from nightmill.jobs.sql.jobs import CHUNK, JOBS, RETRYABLE, by_queue, chunked, retried_values
from nightmill.jobs.sql.locks import hold_batches, refuse_deleting
from nightmill.jobs.sql.outcomes import OF_THE_TEXT
from nightmill.jobs.sql.retrying import retried
from nightmill.jobs.sql.tables import JobRow

Change = Callable[[Any], tuple[dict[str, Any], int] | None]
"""The new parameters and seed of a row; None: it stays. Raises InvalidParameterError where it may not be."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """A group of rows after an attempt to queue them again."""

    rows: Sequence[Mapping[str, Any]]  # id, model, priority of those that are queued
    refused: int = 0  # rows that cannot have the new parameters
    reason: str | None = None  # of the first of them

    @property
    def groups(self) -> dict[tuple[str | None, int], list[str]]:
        """The ids by queue, to be announced."""
        return by_queue(self.rows)


class Requeueing:
    """Queues ended rows of a batch again, in groups, a transaction each."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._database = store.database

    def extend(self, name: str, max_tokens: int, deadline: datetime | None) -> Iterator[Requeued]:
        """Queue the succeeded rows again of which an answer stopped by `length`, with a larger limit.

        Their tokens and texts stay: a worker continues from the tokens, and a row that ends early keeps the
        text. Rows whose limit is as large are not changed. Raises BatchNotFoundError, BatchConflictError.
        """

        def change(row: Any) -> tuple[dict[str, Any], int] | None:
            if GenerationParams.parse(row.params).max_tokens >= max_tokens:
                return None
            return stored(GenerationParams.parse({**row.params, "max_tokens": max_tokens})), row.seed

        values = retried_values(self._database.now(), deadline)
        values = {name: value for name, value in values.items() if name not in OF_THE_TEXT}
        self._store.reopen(name, deadline)
        for ids in self._ids(name, (JobState.SUCCEEDED,)):
            yield self._group(name, ids, (partials.CUT,), change, values, EXTEND)

    def retry(
        self,
        name: str,
        conditions: Sequence[Any],
        changed: Mapping[str, Any],
        deadline: datetime | None,
        *,
        new_seeds: bool,
    ) -> Iterator[Requeued]:
        """Queue rows again that ended without a result, meet `conditions` and can have one.

        changed    parameters that all of them get
        new_seeds  each gets a new random seed

        Raises BatchNotFoundError, BatchConflictError.
        """

        def change(row: Any) -> tuple[dict[str, Any], int]:
            seed = secrets.randbits(MAX_SEED.bit_length()) if new_seeds else row.seed
            params = row.params if isinstance(row.params, Mapping) else {}
            return stored(GenerationParams.parse({**params, **changed})), seed

        values = retried_values(self._database.now(), deadline)
        self._store.reopen(name, deadline)
        for ids in self._ids(name, UNSUCCESSFUL):
            yield self._group(name, ids, (*RETRYABLE, *conditions), change, values, RETRY)

    def _ids(self, name: str, states: Sequence[JobState]) -> Iterator[list[str]]:
        """Yield groups of ids of the rows that are in these states."""
        yield from chunked(self._store.ids(name, *states), CHUNK)

    @retried
    def _group(
        self,
        name: str,
        ids: Sequence[str],
        conditions: Sequence[Any],
        change: Change,
        values: Mapping[str, Any],
        kind: str,
    ) -> Requeued:
        now = self._database.now()
        queued: list[Any] = []
        updates: list[dict[str, Any]] = []
        reasons: list[str] = []
        with self._database.write() as connection:
            refuse_deleting(hold_batches(connection, [name]).get(name))
            query = select(*_READ).where(JobRow.id.in_(ids), *conditions).order_by(JobRow.id)
            for row in connection.execute(query.with_for_update(of=JOBS)).all():
                try:
                    changed = change(row)
                except InvalidParameterError as error:
                    reasons.append(f"row {row.row or row.id}: {error}")
                    continue
                if changed is not None:
                    queued.append(row)
                    updates.append(_update_of(row, *changed, kind, now))
            if updates:
                self._queue(connection, queued, updates, values, kind)
        return Requeued([row._mapping for row in queued], len(reasons), reasons[0] if reasons else None)

    def _queue(
        self,
        connection: Connection,
        rows: Sequence[Any],
        updates: Sequence[dict[str, Any]],
        values: Mapping[str, Any],
        kind: str,
    ) -> None:
        done = connection.execute(
            _GUARDED.values({**_NEW, **followers.queued_again(values)}), updates
        ).rowcount
        if done != len(updates):  # they are locked
            raise AssertionError(f"{done} of {len(updates)} rows were queued again")
        ids = [row.id for row in rows]
        answers.forget(connection, ids)
        logprobs.forget(connection, ids)
        followers.hold_again(connection, ids, values["sent_at"])
        if kind == RETRY:  # what may be there was drawn with other parameters
            partials.forget(connection, ids)


_READ = (
    *(JobRow.prompt, JobRow.prompt_ids, JobRow.messages, JobRow.rendering, JobRow.constrained, JobRow.reuse),
    *(JobRow.reused_from, JobRow.content_key, JobRow.owner),
    *(JobRow.id, JobRow.row, JobRow.model, JobRow.priority, JobRow.params, JobRow.seed, JobRow.history),
    *(JobRow.attempt, JobRow.state, JobRow.stop_reason, JobRow.text, JobRow.completion_tokens),
    JobRow.arithmetic,
)
_GUARDED = update(JOBS).where(
    JobRow.id == bindparam("of_job"),
    JobRow.attempt == bindparam("of_attempt"),
    JobRow.state == bindparam("of_state"),
)
_NEW = {
    "params": bindparam("new_params", type_=JOBS.c.params.type),
    "seed": bindparam("new_seed"),
    "content_key": bindparam("new_content_key"),
    "history": bindparam("new_history", type_=JOBS.c.history.type),
}


def _update_of(row: Any, params: dict[str, Any], seed: int, kind: str, now: datetime) -> dict[str, Any]:
    realm = realm_in(row.content_key) if row.content_key else realm_of(row.owner)
    entry = former(row._mapping, params, seed, kind, now)
    return {
        "of_job": row.id,
        "of_attempt": row.attempt,
        "of_state": row.state,
        "new_params": params,
        "new_seed": seed,
        "new_content_key": content_key(row.reuse, {**row._mapping, "params": params}, seed, realm),
        "new_history": [*(row.history if isinstance(row.history, list) else []), entry],
    }
