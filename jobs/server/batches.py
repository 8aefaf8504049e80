"""/v1/batches, as OpenAI's API reference has it. What is done for a batch is in `jobs.server.keeping`."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.batch_status import RowCount
from nightmill.jobs.contract import JobState, JsonObject
from nightmill.jobs.fields import check_option, unknown_field
from nightmill.jobs.formats.openai import CHAT, COMPLETIONS
from nightmill.jobs.prompts import json_type
from nightmill.jobs.server.batch_endpoints import BatchEndpoints
from nightmill.jobs.server.errors import invalid
from nightmill.jobs.server.files import PREFIX
from nightmill.jobs.sql.http_batches import HttpBatch, HttpStatus
from nightmill.jobs.when import parse_span

BODY = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "webhook"})
_NOT_HERE = {"output_expires_after": "the server decides how long files stay"}
_LONGEST_WINDOW = timedelta(days=366)
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512  # of metadata, as OpenAI has it


class Batches(BatchEndpoints):
    """The endpoints."""

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        caller = self._desk.keys.caller(request)
        caller.need_to_submit()
        body = await self._desk.bodies.object(request, caller.name)
        for name, value in body.items():
            if name not in BODY and value is not None:
                raise unknown_field(name, BODY, _NOT_HERE.get(name))
        if body.get("endpoint") not in (CHAT, COMPLETIONS):
            raise invalid("endpoint", f"must be {CHAT} or {COMPLETIONS}")
        window, duration = _window(body.get("completion_window"))
        now = await self._desk.run(self._desk.client.database.now)
        asked = HttpBatch(
            id=self._ids.draw(),
            owner=caller.name,
            input_file=text_of(body, "input_file_id"),
            created_at=now,
            endpoint=body["endpoint"],
            completion_window=window,
            meta=_metadata(body.get("metadata")),
            deadline_at=now + duration,
        )
        webhook = body.get("webhook")
        batch = await self._handing_in.submit(request, caller, asked, "input_file_id", webhook)
        return JSONResponse(await self._object(batch))

    async def _object(self, batch: HttpBatch, *, listed: bool = False) -> JsonObject:
        counts: list[RowCount] = []
        if batch.total is None:
            counts = await self._desk.run(self._desk.client.batches.store.counts, batch.batch)
        return batch_object(batch, counts)


def batch_object(batch: HttpBatch, counts: list[RowCount]) -> JsonObject:
    """OpenAI's object for a batch; `counts` of its rows while it has none of its own."""
    total, completed, failed = batch.total, batch.completed, batch.failed
    read, wrote = batch.prompt_tokens, batch.completion_tokens
    if total is None:
        total = sum(count.rows for count in counts)
        completed = sum(count.rows for count in counts if count.state is JobState.SUCCEEDED)
        failed = sum(count.rows for count in counts if count.state in (JobState.FAILED, JobState.CANCELLED))
        read = sum(count.prompt_tokens for count in counts)
        wrote = sum(count.completion_tokens for count in counts)
    read, wrote = read or 0, wrote or 0

    errors = batch.errors if batch.note is None else [*batch.errors, note_error(batch.note)]

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
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": wrote,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + wrote,
        },
        "metadata": batch.meta or None,
    }


def note_error(note: str) -> JsonObject:
    """OpenAI's object for what keeps a batch from going on just now; it is gone once that is over."""
    return {"code": "delayed", "line": None, "message": note, "param": None}


def text_of(body: JsonObject, name: str) -> str:
    """A text that a body must have; raises HttpError."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(name, "must be a text, the id of a file" if value is not None else "is missing")
    return value


def _window(value: Any) -> tuple[str, timedelta]:
    """As it was said, and how long that is."""
    if not isinstance(value, str) or len(value) > 32:
        raise invalid("completion_window", "must be a duration as a text, such as 24h")
    duration = parse_span("completion_window", value)
    if not timedelta(0) < duration <= _LONGEST_WINDOW:
        raise invalid(
            "completion_window", f"must be longer than nothing, and {_LONGEST_WINDOW.days}d at most"
        )
    return value, duration


def _metadata(value: Any) -> JsonObject:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid("metadata", f"must be an object, not {json_type(value)}")
    good = len(value) <= _MOST_PAIRS and all(
        isinstance(one, str) and len(one) <= _LONGEST_VALUE and len(name) <= _LONGEST_KEY
        for name, one in value.items()
    )
    if not good:
        raise invalid(
            "metadata",
            f"must have at most {_MOST_PAIRS} names of up to {_LONGEST_KEY} characters, with texts of up to "
            f"{_LONGEST_VALUE}",
        )
    check_option("metadata", value)
    return dict(value)


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
