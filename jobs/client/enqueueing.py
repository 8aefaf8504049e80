"""Enqueueing from Python and over HTTP: jobs are checked, committed in groups, and announced to workers."""

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from nightmill.jobs.base.contract import Prompt
from nightmill.jobs.base.ids import IdSource, JobIds
from nightmill.jobs.batches.grouping import characters, grouped
from nightmill.jobs.errors import InvalidParameterError, InvalidRequestError, UnknownModelError
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.request.fields import deadline_moment
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql import inserting
from nightmill.jobs.sql.jobs import Store, by_queue
from nightmill.jobs.sql.outbox import after_commit
from nightmill.jobs.sql.queue_room import leave_room
from nightmill.jobs.sql.workers import WorkerStore

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Enqueued(NamedTuple):
    """The jobs of a request, in the order of its prompts, and the request's id; a single job's id serves for
    both."""

    request_id: str
    job_ids: list[str]


class Enqueueing:
    """Inserts jobs and sends their messages. Safe to share between threads."""

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
            defaults = defaults.as_interactive()
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
                    valid = rows[: error.position]
                    place = len(ids) + error.position
                    if valid:
                        ids.extend(self._keep(valid, session))
                    failure = _with_place(error, place, len(ids))
            if failure is not None:
                failure.enqueued = ids
                raise failure
        if not ids and defaults.batch is not None:
            self._enter_batch(defaults, session)
        return ids

    def enqueue_spec(self, spec: JobSpec, owner: str | None) -> str:
        """Queue a parsed job for `owner`; returns its id. Raises like `Client.enqueue`.

        Idempotency keys are separate for each owner.
        """
        return self._enqueue_specs([spec], {"owner": owner})[0]

    def enqueue_request(self, specs: Sequence[JobSpec], owner: str | None) -> Enqueued:
        """Queue the jobs of one request, all or none, for `owner`; returns the ids of request and jobs.

        If all have an idempotency key, repeating the request returns the same ids. Raises like
        `Client.enqueue`.
        """
        if len(specs) == 1:
            job_id = self.enqueue_spec(specs[0], owner)
            return Enqueued(job_id, [job_id])
        request_id = self._ids.draw()
        job_ids = self._enqueue_specs(specs, {"owner": owner, "request_id": request_id})
        if specs[0].idempotency_key is not None:  # the request may exist already
            request_id = self._store.get(job_ids[0]).request_id or request_id
        return Enqueued(request_id, job_ids)

    def enqueue_specs(self, specs: Sequence[JobSpec]) -> list[str]:
        """Queue all of these jobs or none; returns their ids, in the same order."""
        return self._enqueue_specs(specs, {"owner": None})

    def _enqueue_specs(self, specs: Sequence[JobSpec], more: dict[str, Any]) -> list[str]:
        """Queue all of these jobs or none, with these additional columns; returns their ids."""
        self._broker.prepare()
        now, checked_models = self._database.now(), set[str]()
        rows = [
            self._row(_owned(spec, number, more["owner"]), now, checked_models) | more
            for number, spec in enumerate(specs)
        ]
        if len(rows) > 1 and rows[0]["fingerprint"]:  # the key belongs to all of them together
            fingerprint = hashlib.sha256("".join(row["fingerprint"] for row in rows).encode()).hexdigest()
            rows = [row | {"fingerprint": fingerprint} for row in rows]
        return self._keep(rows, None)

    def check_model(self, model: str) -> None:
        """Raise UnknownModelError if there ever were workers, and none that had a model of this name."""
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
        """Refuse a deadline that has passed, unless the job was enqueued before under its idempotency key."""
        try:
            deadline_moment(spec.deadline, now)
        except InvalidParameterError:
            if spec.idempotency_key is None or not self._store.has_key(spec.idempotency_key):
                raise

    def _keep(self, rows: list[dict[str, Any]], session: "Session | None") -> list[str]:
        """Insert rows and send their messages; returns the ids for the caller."""
        leave_room(self._database, rows, self._settings.shard_size)
        if session is not None:
            self._database.ensure_schema()
            replaced = inserting.insert(rows, session.connection())
            after_commit(session, lambda: self._announce_rows(rows, replaced))
        else:
            replaced = inserting.add(rows, self._database)
            self._announce_rows(rows, replaced)
        return [replaced.get(row["id"], row["id"]) for row in rows]

    def _enter_batch(self, defaults: JobSpec, session: "Session | None") -> None:
        """Insert a batch that nothing was queued for, so that who reads its results finds it without any."""
        row = {"batch": defaults.batch, "model": defaults.model, "created_at": self._database.now()}
        if session is not None:
            self._database.ensure_schema()
            inserting.insert_batches([row], session.connection())
        else:
            inserting.add_batches([row], self._database)

    def _announce_rows(self, rows: list[dict[str, Any]], replaced: Mapping[str, str]) -> None:
        self._announcer.announce(
            by_queue(row for row in rows if row["sent_at"] and row["id"] not in replaced)
        )


def owned_key(owner: str | None, idempotency_key: str) -> str:
    """Return the stored form of an idempotency key, which is unique to its owner."""
    return idempotency_key if owner is None else f"{owner}/{idempotency_key}"


def _owned(spec: JobSpec, number: int, owner: str | None) -> JobSpec:
    """Return a spec with its owner and the owner's key; jobs after the first get a number in it, after a line
    break that no header contains."""
    spec = spec if owner is None else replace(spec, asker=owner)
    if spec.idempotency_key is None:
        return spec
    key = owned_key(owner, spec.idempotency_key)
    return replace(spec, idempotency_key=f"{key}\n{number}" if number else key)


def _with_place(error: InvalidRequestError, index: int, enqueued: int) -> InvalidRequestError:
    if index == 0:
        return error
    said = f"item {index}: {error} ({enqueued} jobs before it are queued)"
    return type(error)(said, field=error.field, code=error.code)
