"""Nightmill's own endpoints: POST /execute, POST /v1/generate, and /v1/jobs.

Bodies have the keywords of `enqueue` and are parsed in the same way.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JobState, JsonObject
from nightmill.jobs.errors import InvalidParameterError, NightmillError
from nightmill.jobs.formats.results import answer_values, reply_values
from nightmill.jobs.reply.embeddings import written
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import FIELDS, unknown_field
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.bodies import read_times
from nightmill.jobs.server.errors import HttpError, http_error_of, invalid
from nightmill.jobs.server.events import COMMENT, EventStream, event, with_pauses
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.listing import Page
from nightmill.jobs.server.reusing import origin, with_reuse
from nightmill.jobs.server.tiers import FIELD, Tier, asked_tier, tier_of
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.streams.pieces import START, TextPosition

_NOT_HERE = {
    "batch": "a batch is submitted as a whole, with `nightmill batch submit`",
    "idempotency_key": "call it job_id",
}
JOB_FIELDS = FIELDS.keys() - _NOT_HERE.keys() | {"prompt", "messages"}
DELIVERY = frozenset({"job_id", "stream", "cancel_on_close", FIELD})
_LONGEST_ID = 128


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A parsed body: the job, and the delivery of its answer."""

    spec: JobSpec
    stream: bool
    cancel_on_close: bool

    @classmethod
    def read(cls, body: JsonObject, defaults: JobSpec) -> "GenerateBody":
        """Parse a body; raises HttpError and InvalidRequestError, which name the field."""
        flags = [_flag(body, name) for name in ("stream", "cancel_on_close")]
        key = body.pop("job_id", None)
        if key is not None and (not isinstance(key, str) or not 0 < len(key) <= _LONGEST_ID):
            raise invalid("job_id", f"must be a text of 1 to {_LONGEST_ID} characters")
        for name in body:
            if name not in JOB_FIELDS:
                raise unknown_field(name, JOB_FIELDS | DELIVERY, _NOT_HERE.get(name))
        read_times(body, datetime.now(UTC))
        return cls(JobSpec.parse(body | {"idempotency_key": key}, defaults), *flags)


class Native:
    """Nightmill's own endpoints."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def execute(self, request: Request) -> Response:
        """POST /execute: stream the text as events."""
        return await self._generate(request, stream=True)

    async def generate(self, request: Request) -> Response:
        """POST /v1/generate: return the ended job, or with `stream` the text as events."""
        return await self._generate(request, stream=False)

    async def submit(self, request: Request) -> Response:
        """POST /v1/jobs: queue a job."""
        service = self._service
        caller = service.keys.caller(request)
        asked = await service.bodies.read(
            request, caller.name, lambda body: GenerateBody.read(body, JobSpec())
        )
        if asked.stream or asked.cancel_on_close:
            raise invalid("stream", "is for /v1/generate; read GET /v1/jobs/ID/events")
        job_id = await service.queue(caller, with_reuse(request, asked.spec))
        return JSONResponse(job_object(await service.job(caller, job_id)), 202)

    async def listed(self, request: Request) -> Response:
        """GET /v1/jobs: list the caller's jobs, newest first; `after` is the last id of the previous page."""
        service, query = self._service, request.query_params
        caller = service.keys.caller(request)
        page, state = Page.read(query, more=("state", "request")), query.get("state")
        if state is not None and state not in set(JobState):
            raise invalid("state", f"must be one of {', '.join(JobState)}")
        selection = Selection(
            after_id=page.after if page.oldest_first else None,
            before_id=None if page.oldest_first else page.after,
            owner=caller.only,
            states=None if state is None else [JobState(state)],
            request_id=query.get("request"),
        )
        newest_first = not page.oldest_first
        found = await service.look(
            service.client.store.find, selection, page.limit + 1, newest_first=newest_first
        )
        return JSONResponse(page.answer([job_object(job) for job in found]))

    async def shown(self, request: Request) -> Response:
        """GET /v1/jobs/ID."""
        caller = self._service.keys.caller(request)
        return JSONResponse(job_object(await self._service.job(caller, request.path_params["job_id"])))

    async def cancelled(self, request: Request) -> Response:
        """DELETE /v1/jobs/ID: cancel it."""
        caller = self._service.keys.caller(request)
        return JSONResponse(job_object(await self._service.cancel(caller, request.path_params["job_id"])))

    async def request_cancelled(self, request: Request) -> Response:
        """DELETE /v1/jobs?request=ID: cancel the jobs of a request with several prompts."""
        caller = self._service.keys.caller(request)
        caller.need_to_submit()
        if list(request.query_params) != ["request"]:
            raise invalid(
                "request", "is missing, or not alone; name the request whose jobs are to be cancelled"
            )
        jobs = await self._service.cancel_request(caller, request.query_params["request"])
        return JSONResponse(Page(len(jobs), None).answer([job_object(job) for job in jobs]))

    async def events(self, request: Request) -> Response:
        """GET /v1/jobs/ID/events: stream the text, after the piece that Last-Event-ID names."""
        caller = self._service.keys.caller(request)
        job = await self._service.job(caller, request.path_params["job_id"])
        last = request.headers.get("last-event-id")
        try:
            place = TextPosition.parse(last) if last else START
        except InvalidParameterError as error:
            raise error.renamed("Last-Event-ID") from None
        return EventStream(job.id, self._events(job.id, place), on_close=lambda: None)

    async def _generate(self, request: Request, *, stream: bool) -> Response:
        service = self._service
        caller = service.keys.caller(request)

        def read(body: JsonObject) -> tuple[Tier, GenerateBody]:
            tier = tier_of(body, caller.tier)
            return tier, GenerateBody.read(
                body, JobSpec() if tier is Tier.FLEX else JobSpec().as_interactive()
            )

        tier, asked = await service.bodies.read(request, caller.name, read)
        asked_tier.set(tier)
        job_id = await service.enqueue(caller, with_reuse(request, asked.spec))
        if not stream and not asked.stream:
            job = await service.finished(request, job_id, cancel=asked.cancel_on_close)
            return JSONResponse(job_object(job), headers={"X-Request-ID": job_id} | origin(job))
        over: list[bool] = []
        return EventStream(
            job_id,
            self._events(job_id, START, over),
            on_close=lambda: service.cancel_later(job_id) if asked.cancel_on_close and not over else None,
        )

    async def _events(
        self, job_id: str, place: TextPosition, over: list[bool] | None = None
    ) -> AsyncIterator[str]:
        """Yield the pieces, and at the end the job's result; `over` gets an item once that is known."""
        try:
            async for piece in with_pauses(self._service.pieces(job_id, place)):
                if piece is None:
                    yield COMMENT
                else:
                    yield event({"t": piece, "i": piece.start}, place=piece.place)
            job = await self._service.run(self._service.client.get, job_id)
            if over is not None:
                over.append(True)
            yield event({"job_id": job.id} | _outcome(job))
        except (NightmillError, HttpError) as error:  # too late for an HTTP status
            yield event(http_error_of(error).body)


def job_object(job: Job) -> JsonObject:
    """Build the object of a job for its owner: the request without the prompt, state and result."""
    return {
        "id": job.id,
        "object": "job",
        "owner": job.owner,
        "model": job.model,
        "custom_id": job.custom_id,
        "request_id": job.request_id,
        "metadata": job.metadata,
        "params": job.params.model_dump(mode="json", warnings=False),
        "priority": job.priority,
        "scheduled_at": _time(job.scheduled_at),
        "deadline_at": _time(job.deadline_at),
        "reused_from": job.reused_from,
        "prior": job.prior,
        "held": job.held,
        "text": job.text,
        "answers": answer_values(job),
        **(reply_values(job.replies[0]) if job.answers else {}),
        **_numbers(job),
    } | _outcome(job)


def _numbers(job: Job) -> JsonObject:
    """The embedding or the relevance of a job that has one."""
    if job.packed_embedding is None:
        return {}
    if job.relevance is not None:
        return {"relevance": job.relevance}
    return {"embedding": written(job.packed_embedding)}


def _outcome(job: Job) -> JsonObject:
    """Build the result of a job, with times."""
    return {
        "state": str(job.state),
        "stop_reason": None if job.stop_reason is None else str(job.stop_reason),
        "error": job.error,
        "tokens_in": job.prompt_tokens,
        "tokens_out": job.completion_tokens,
        "created_at": _time(job.created_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _flag(body: JsonObject, name: str) -> bool:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be true or false, not {json_type(value)}")
    return bool(value)
