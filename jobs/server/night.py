"""/v1/night: batches in Nightmill's own form, with files of any format, all settings, and progress."""

from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import BatchNotFoundError, InvalidParameterError
from nightmill.jobs.reply.batch_status import BatchStatus
from nightmill.jobs.request.fields import OF_A_BATCH, check_option, deadline_moment, unknown_field
from nightmill.jobs.request.limits import LIMIT_KEYS, Limits
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.batch_endpoints import BatchEndpoints
from nightmill.jobs.server.batches import text_of, unlisted_errors, waiting_note
from nightmill.jobs.server.bodies import TIMES, read_times
from nightmill.jobs.server.errors import invalid
from nightmill.jobs.server.files import PREFIX
from nightmill.jobs.sql.http_batches import HttpBatch

BODY = OF_A_BATCH | {"file", "name", "webhook", *LIMIT_KEYS}


class NightEndpoints(BatchEndpoints):
    """Endpoints of /v1/night."""

    async def create(self, request: Request) -> Response:
        """POST /v1/night."""
        caller = self._service.keys.caller(request)
        caller.need_to_submit()
        given = await self._service.bodies.object(request, caller.name)
        body = {name: value for name, value in given.items() if value is not None}
        for name in body:
            if name not in BODY:
                raise unknown_field(name, BODY)
        if "name" in body:
            _check_name(body["name"])
        now = await self._service.run(self._service.client.database.now)
        read_times(body, now)
        begins, ends = body.get("scheduled_at"), deadline_moment(body.get("deadline"), now)
        if begins is not None and ends is not None and ends <= begins:
            raise invalid("deadline", "must be after scheduled_at")
        settings = {name: value for name, value in body.items() if name in OF_A_BATCH and name not in TIMES}
        defaults = JobSpec.defaults(settings, OF_A_BATCH)
        Limits.of(body)
        settings |= {name: body[name] for name in LIMIT_KEYS if name in body}
        if defaults.model is not None:
            await self._service.run(self._service.client.enqueueing.check_model, defaults.model)
        asked = HttpBatch(
            id=self._ids.draw(),
            owner=caller.name,
            input_file=text_of(body, "file"),
            created_at=now,
            name=body.get("name"),
            settings=settings,
            scheduled_at=begins,
            deadline_at=ends,
        )
        batch = await self._submission.submit(request, caller, asked, "file", body.get("webhook"))
        return JSONResponse(await self._object(batch), 202)

    async def retried(self, request: Request) -> Response:
        """POST /v1/night/ID/retry: queue the rows again that ended without a result."""
        caller = self._service.keys.caller(request)
        return JSONResponse(
            await self._object(await self._submission.retry(caller, request.path_params["batch_id"]))
        )

    async def limited(self, request: Request) -> Response:
        """POST /v1/night/ID/limits: change the budget, or the share of rows that may fail."""
        caller = self._service.keys.caller(request)
        caller.need_to_submit()
        given = await self._service.bodies.object(request, caller.name)
        for name in given:
            if name not in LIMIT_KEYS:
                raise unknown_field(name, LIMIT_KEYS)
        batch = await self._submission.set_limits(caller, request.path_params["batch_id"], given)
        return JSONResponse(await self._object(batch))

    async def _object(self, batch: HttpBatch, *, listed: bool = False) -> JsonObject:
        """Build the object of a batch; in a list, without its errors."""
        status = await self._service.run(self._status, batch.batch, not listed)
        return night_object(batch, status)

    def _status(self, name: str, errors: bool) -> BatchStatus | None:
        try:
            return self._service.client.get_batch(name).status(errors=errors)
        except BatchNotFoundError:  # no row is entered yet, or it was pruned
            return None


def _check_name(name: Any) -> None:
    """Check the name like that of any batch."""
    try:
        check_option("batch", name)
    except InvalidParameterError as error:
        raise error.renamed("name") from None


def night_object(batch: HttpBatch, status: BatchStatus | None) -> JsonObject:
    """Build a batch's object; `status` is that of its rows, if there are any."""
    made: JsonObject = {
        "id": batch.batch,
        "object": "night",
        "owner": batch.owner,
        "name": batch.name,
        "file": PREFIX + batch.input_file,
        "settings": batch.settings,
        "status": str(batch.status),
        "state": None if status is None else str(status.state),
        "rows": batch.total,
        "succeeded": batch.completed,
        "unsuccessful": batch.failed,
        "tokens_in": batch.prompt_tokens,
        "tokens_out": batch.completion_tokens,
        "tokens_per_second": None,
        "estimated_end": None,
        "bad_rows": [*batch.errors, *unlisted_errors(batch)],
        "note": batch.note,
        "rows_before": None,
        "budget": None,
        "spent": {},
        "max_failures": None,
        "stopped_because": None,
        "errors": [],
        "unlisted_errors": 0,
        "output_file": batch.output_file and PREFIX + batch.output_file,
        "error_file": batch.error_file and PREFIX + batch.error_file,
        "created_at": _time(batch.created_at),
        "scheduled_at": _time(batch.scheduled_at),
        "deadline_at": _time(batch.deadline_at),
        "ended_at": _time(batch.ended_at),
    }
    if status is not None:
        made |= {
            "rows": status.rows,
            "succeeded": status.succeeded,
            "unsuccessful": status.unsuccessful,
            "tokens_in": status.prompt_tokens,
            "tokens_out": status.completion_tokens,
            "tokens_per_second": status.tokens_per_second,
            "estimated_end": _time(status.estimated_end),
            "rows_before": status.rows_before,
            "budget": status.budget,
            "spent": status.spent,
            "max_failures": status.max_failures,
            "stopped_because": status.stopped_because,
            "errors": [{"rows": group.rows, "message": group.message} for group in status.errors],
            "unlisted_errors": status.unlisted_errors,
            "note": batch.note or waiting_note(status.unserved, batch),
        }
    return made


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
