"""Queueing jobs from Python and over HTTP: checked, committed in groups, and announced to workers."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from nightmill.jobs.batches.grouping import characters, grouped
from nightmill.jobs.contract import Prompt
from nightmill.jobs.errors import InvalidParameterError, InvalidRequestError, UnknownModelError
from nightmill.jobs.fields import deadline_moment
from nightmill.jobs.ids import IdSource, JobIds
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.spec import JobSpec
from nightmill.jobs.sql import inserting
from nightmill.jobs.sql.jobs import Store, by_queue
from nightmill.jobs.sql.outbox import after_commit
from nightmill.jobs.sql.workers import WorkerStore

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Enqueueing:
    """Makes rows of jobs, and sees to their messages. Safe to share between threads."""

    def __init__(self, store: Store, workers: WorkerStore, broker: Broker, announcer: Announcer) -> None:
        self._store = store
        self._database = store.database
        self._workers = workers
        self._broker = broker
        self._settings = broker.settings
        self._announcer = announcer
        self._ids = IdSource()

    def enqueue(
        self,
        items: Iterable[Prompt | Mapping[str, Any]],
        settings: Mapping[str, Any],
        session: "Session | None",
        *,
        interactive: bool = False,
    ) -> JobIds:
        """Queue every item, in groups; see `Client.enqueue_many`."""
        defaults = JobSpec.defaults(settings)
        if interactive and settings.get("priority") is None:
            defaults = defaults.waited_for()
        self._broker.prepare()
        ids = JobIds()
        checked_models: set[str] = set()
        numbered = zip(count(), items, strict=False)
        for group in grouped(numbered, lambda numbered: characters(numbered[1])):
            now = self._database.now()
            rows: list[dict[str, Any]] = []
            failure: InvalidRequestError | None = None
            for index, item in group:
                try:
                    rows.append(self._row(JobSpec.parse(item, defaults), now, checked_models))
                except InvalidRequestError as error:
                    failure = _with_place(error, index, len(ids) + len(rows))
                    break
            if rows:
                try:
                    ids.extend(self._keep(rows, session))
                except InvalidRequestError as error:
                    kept = rows[: error.position]
                    place = len(ids) + error.position
                    if kept:
                        ids.extend(self._keep(kept, session))
                    failure = _with_place(error, place, len(ids))
            if failure is not None:
                failure.enqueued = ids
                raise failure
        return ids

    def enqueue_spec(self, spec: JobSpec, owner: str | None) -> str:
        """Queue one job; see `Client.enqueue_spec`."""
        self._broker.prepare()
        if owner is not None and spec.idempotency_key is not None:
            spec = replace(spec, idempotency_key=owned_key(owner, spec.idempotency_key))
        row = self._row(spec, self._database.now(), set()) | {"owner": owner}
        return self._keep([row], None)[0]

    def check_model(self, model: str) -> None:
        """See `Client.check_model`."""
        known = self._workers.models()
        if not known or model in known:
            return
        close = difflib.get_close_matches(model, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UnknownModelError(
            f"model: no worker has ever served {model!r}; known are {', '.join(known)}.{hint} "
            f"For a new model, start its worker first: nightmill worker --model FILE --name {model}",
            field="model",
        )

    def _row(self, spec: JobSpec, now: datetime, checked_models: set[str]) -> dict[str, Any]:
        if spec.model is not None and spec.model not in checked_models:
            self.check_model(spec.model)
            checked_models.add(spec.model)
        if spec.deadline is not None:
            self._check_deadline(spec, now)
        return spec.row(self._ids.draw(), now, self._settings.max_attempts)

    def _check_deadline(self, spec: JobSpec, now: datetime) -> None:
        """Refuse one that has passed, but for a job that was enqueued before it did."""
        try:
            deadline_moment(spec.deadline, now)
        except InvalidParameterError:
            if spec.idempotency_key is None or not self._store.has_key(spec.idempotency_key):
                raise

    def _keep(self, rows: list[dict[str, Any]], session: "Session | None") -> list[str]:
        """Insert rows and see to their messages; returns the ids to hand out."""
        if session is not None:
            self._database.ensure_schema()
            replaced = inserting.insert(rows, session.connection())
            after_commit(session, lambda: self._announce_rows(rows, replaced))
        else:
            replaced = inserting.add(rows, self._database)
            self._announce_rows(rows, replaced)
        return [replaced.get(row["id"], row["id"]) for row in rows]

    def _announce_rows(self, rows: list[dict[str, Any]], replaced: Mapping[str, str]) -> None:
        self._announcer.announce(
            by_queue(row for row in rows if row["sent_at"] and row["id"] not in replaced)
        )


def owned_key(owner: str, idempotency_key: str) -> str:
    """As a row has it: a key is its owner's, and no other's."""
    return f"{owner}/{idempotency_key}"


def _with_place(error: InvalidRequestError, index: int, enqueued: int) -> InvalidRequestError:
    if index == 0:
        return error
    said = f"item {index}: {error} ({enqueued} jobs before it are queued)"
    return type(error)(said, field=error.field, code=error.code)
