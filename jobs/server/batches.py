"""/v1/batches as in OpenAI's API. `jobs.server.batch_processor` does the work on batches."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JobState, JsonObject
from nightmill.jobs.base.times import parse_span
from nightmill.jobs.errors import BatchNotFoundError
from nightmill.jobs.formats.openai import URLS
from nightmill.jobs.formats.pairs import read_metadata
from nightmill.jobs.reply.batch_status import RowCount, unserved_sentence
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.server.batch_endpoints import BatchEndpoints
from nightmill.jobs.server.errors import invalid
from nightmill.jobs.server.files import PREFIX
from nightmill.jobs.server.limit_headers import limits_asked
from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus

BODY = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "webhook"})
_NOT_HERE = {"output_expires_after": "the server decides how long files stay"}
_LONGEST_WINDOW = timedelta(days=366)


class OpenAIBatchEndpoints(BatchEndpoints):
    """Endpoints of /v1/batches."""

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        caller = self._service.keys.caller(request)
        caller.need_to_submit()
        body = await self._service.bodies.object(request, caller.name)
        for name, value in body.items():
            if name not in BODY and value is not None:
                raise unknown_field(name, BODY, _NOT_HERE.get(name))
        if body.get("endpoint") not in URLS:
            raise invalid("endpoint", f"must be one of {', '.join(URLS)}")
        window, duration = _window(body.get("completion_window"))
        now = await self._service.run(self._service.client.database.now)
        asked = HttpBatch(
            id=self._ids.draw(),
            owner=caller.name,
            input_file=text_of(body, "input_file_id"),
            created_at=now,
            endpoint=body["endpoint"],
            completion_window=window,
            meta=read_metadata(body.get("metadata")),
            deadline_at=now + duration,
            settings=dict(limits_asked(request)),
        )
        webhook = body.get("webhook")
        batch = await self._submission.submit(request, caller, asked, "input_file_id", webhook)
        return JSONResponse(await self._object(batch))

    async def _object(self, batch: HttpBatch, *, listed: bool = False) -> JsonObject:
        counts: list[RowCount] = []
        note: str | None = None
        stopped = None if listed else await self._service.run(self._stopped, batch)
        if batch.total is None:
            counts = await self._service.run(self._service.client.batches.store.counts, batch.batch)
            if batch.status is HttpStatus.IN_PROGRESS and not listed:
                note = await self._service.run(self._waits, batch, counts)
        return batch_object(batch, counts, note, stopped)

    def _stopped(self, batch: HttpBatch) -> str | None:
        """Say which limit has stopped its rows; None if none has."""
        try:
            return self._service.client.batches.store.get(batch.batch).stopped_because
        except BatchNotFoundError:  # no row is entered yet, or it was deleted
            return None

    def _waits(self, batch: HttpBatch, counts: list[RowCount]) -> str | None:
        """Describe unserved models that its rows wait for; None if there are none."""
        try:
            models = self._service.client.get_batch(batch.batch).unserved(counts)
        except BatchNotFoundError:  # it was deleted
            return None
        return waiting_note(models, batch)


def batch_object(
    batch: HttpBatch, counts: list[RowCount], note: str | None = None, stopped: str | None = None
) -> JsonObject:
    """Build OpenAI's object for a batch; `counts` are used while it has none of its own.

    note     reason for a delay, if it has no note of its own
    stopped  the limit that has stopped its rows
    """
    total, completed, failed = batch.total, batch.completed, batch.failed
    read, wrote = batch.prompt_tokens, batch.completion_tokens
    cached, thought = batch.cached_tokens, batch.reasoning_tokens
    if total is None:
        total = sum(count.rows for count in counts)
        completed = sum(count.rows for count in counts if count.state is JobState.SUCCEEDED)
        failed = sum(count.rows for count in counts if count.state in (JobState.FAILED, JobState.CANCELLED))
        read = sum(count.prompt_tokens for count in counts)
        wrote = sum(count.completion_tokens for count in counts)
        cached = sum(count.cached_tokens for count in counts)
        thought = sum(count.reasoning_tokens for count in counts)
    read, wrote = read or 0, wrote or 0

    errors = [*batch.errors, *unlisted_errors(batch)]
    if (note := batch.note or note) is not None:
        errors.append(note_error(note))
    if stopped is not None:
        errors.append(limit_error(stopped, batch))

    def ended(status: HttpStatus) -> int | None:
        return _seconds(batch.ended_at) if batch.status is status else None

    return {
        "id": batch.batch,
        "object": "batch",
        "endpoint": batch.endpoint or "",
        "model": batch.settings.get("model"),
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": PREFIX + batch.input_file,
        "completion_window": batch.completion_window or "",
        "status": str(batch.status),
        "output_file_id": batch.output_file and PREFIX + batch.output_file,
        "error_file_id": batch.error_file and PREFIX + batch.error_file,
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.deadline_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "completed_at": ended(HttpStatus.COMPLETED),
        "failed_at": ended(HttpStatus.FAILED),
        "expired_at": ended(HttpStatus.EXPIRED),
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": ended(HttpStatus.CANCELLED),
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached or 0},
            "output_tokens": wrote,
            "output_tokens_details": {"reasoning_tokens": thought or 0},
            "total_tokens": read + wrote,
        },
        "metadata": batch.meta or None,
    }


def unlisted_errors(batch: HttpBatch) -> list[JsonObject]:
    """Build OpenAI's error for the number of bad rows that are not listed; empty if all are."""
    named = sum(isinstance(error, dict) and error.get("line") is not None for error in batch.errors)
    left = (batch.invalid or 0) - named
    if left <= 0:
        return []
    said = f"{left:,} more rows cannot be run; the error file names all of them"
    return [{"code": "more_errors", "line": None, "message": said, "param": None}]


def note_error(note: str) -> JsonObject:
    """Build OpenAI's error for a temporary delay."""
    return {"code": "delayed", "line": None, "message": note, "param": None}


def limit_error(stopped: str, batch: HttpBatch) -> JsonObject:
    """Build OpenAI's error for a limit that has stopped a batch."""
    remedy = f"POST /v1/night/{batch.batch}/limits raises it"
    return {"code": "budget", "line": None, "message": f"{stopped}; {remedy}", "param": None}


def waiting_note(models: Sequence[str | None], batch: HttpBatch) -> str | None:
    """Describe unserved models that a batch waits for; None if there are none."""
    if not models:
        return None
    ends = None if batch.deadline_at is None else f"{batch.deadline_at:%Y-%m-%d %H:%M:%S} UTC"
    return unserved_sentence(models, ends)


def text_of(body: JsonObject, name: str) -> str:
    """Return a required text of a body; raises HttpError."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(name, "must be a text, the id of a file" if value is not None else "is missing")
    return value


def _window(value: Any) -> tuple[str, timedelta]:
    """Parse a completion window; returns it as given, and its duration."""
    if not isinstance(value, str) or len(value) > 32:
        raise invalid("completion_window", "must be a duration as a text, such as 24h")
    duration = parse_span("completion_window", value)
    if not timedelta(0) < duration <= _LONGEST_WINDOW:
        raise invalid(
            "completion_window", f"must be longer than nothing, and {_LONGEST_WINDOW.days}d at most"
        )
    return value, duration


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
