"""/v1/responses as in OpenAI's API: a response is a job, stored as its row."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.printable import printable
from nightmill.jobs.errors import InvalidTransitionError, JobNotFoundError, NightmillError
from nightmill.jobs.formats.neutral import check_neutral
from nightmill.jobs.formats.responses.answer import PREFIX, response_body
from nightmill.jobs.formats.responses.conversation import FIELD, continued, conversation_of, own_messages
from nightmill.jobs.formats.responses.items import message_items
from nightmill.jobs.formats.responses.request import INCLUDED, ResponseRequest, read_response
from nightmill.jobs.formats.shapes import flag_of, mapping, only
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.errors import HttpError, http_error_of, http_error_of_job, invalid
from nightmill.jobs.server.events import COMMENT, EventStream, begun, with_pauses
from nightmill.jobs.server.job_service import JobService, attended, idempotency_key
from nightmill.jobs.server.keys import Caller
from nightmill.jobs.server.listing import items_page
from nightmill.jobs.server.model_names import served_model
from nightmill.jobs.server.responses.streaming import ResponseEvents
from nightmill.jobs.server.reusing import origin, with_reuse
from nightmill.jobs.server.tiers import Tier, asked_tier, tier_of
from nightmill.jobs.server.typed_events import typed_event
from nightmill.jobs.sql.deletion import delete_job

_LONGEST_ID = 80  # characters that are shown
_STREAM = frozenset({"stream", "include_obfuscation", "include", "include[]"})
_NO_PLACE = (
    "is not supported: pieces may be others when they come again; leave it out, or read on at "
    "/v1/jobs/ID/events with Last-Event-ID"
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A parsed body, with the delivery of its answer."""

    response: ResponseRequest
    stream: bool
    tier: Tier


class Responses:
    """Endpoints of /v1/responses."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        service = self._service
        caller = service.keys.caller(request)
        asked = await service.bodies.read(request, caller.name, partial(self._read, caller))
        asked_tier.set(asked.tier)
        spec = with_reuse(request, await self._going_on(caller, asked.response))
        key = idempotency_key(request)
        if key is not None:
            spec = replace(spec, idempotency_key=key)
        background = asked.response.background
        job_id = await (service.queue if background else service.enqueue)(caller, spec)
        if asked.stream:
            return await self._streamed(request, job_id, background=background, key=key)
        if background:
            job = await service.run(service.client.get, job_id)
        else:
            job = await service.finished(request, job_id, cancel=key is None)
            if (error := http_error_of_job(job)) is not None:
                raise error
        return await self._answer(job)

    async def shown(self, request: Request) -> Response:
        """GET /v1/responses/ID, with `stream=true` as events from the beginning."""
        query = request.query_params
        for name in query:
            if name not in _STREAM:
                raise unknown_field(name, _STREAM, _NO_PLACE if name == "starting_after" else None)
        for name in ("stream", "include_obfuscation"):
            if query.get(name, "false") not in ("true", "false"):
                raise invalid(name, "must be true or false")
        _check_included(request)
        job = await self._find(self._service.keys.caller(request), request.path_params["response_id"])
        if query.get("stream") == "true":
            return await self._followed(job)
        return await self._answer(job)

    async def deleted(self, request: Request) -> Response:
        """DELETE /v1/responses/ID: delete its row with the text."""
        service, named = self._service, request.path_params["response_id"]
        caller = service.keys.caller(request)
        job = await self._find(caller, named)
        caller.need_to_change(job.owner)
        if not await service.run(delete_job, service.client.database, job.id):
            raise InvalidTransitionError(f"response {PREFIX}{job.id} has not ended: cancel it first")
        return JSONResponse({"id": PREFIX + job.id, "object": "response", "deleted": True})

    async def cancelled(self, request: Request) -> Response:
        """POST /v1/responses/ID/cancel: cancel it, unless it has ended."""
        caller = self._service.keys.caller(request)
        job = await self._find(caller, request.path_params["response_id"])
        with suppress(InvalidTransitionError):  # it has ended
            job = await self._service.cancel(caller, job.id)
        return await self._answer(job if job.state.final else await self._service.job(caller, job.id))

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/ID/input_items: list its whole input, including earlier responses."""
        job = await self._find(self._service.keys.caller(request), request.path_params["response_id"])
        _check_included(request)
        items = await self._service.run(lambda: list(message_items(own_messages(job), job.id)))
        return JSONResponse(items_page(request.query_params, items, more=("include", "include[]")))

    def _read(self, caller: Caller, body: JsonObject) -> _Asked:
        tier = tier_of(body, caller.tier)
        stream = flag_of(body.pop("stream", None), "stream", False)
        options = body.pop("stream_options", None)
        if options is not None:
            if not stream:
                raise invalid("stream_options", "is for answers with stream: true; remove it")
            options = mapping(options, "stream_options", "an object")
            only(options, {"include_obfuscation"}, "stream_options")
            flag_of(options.get("include_obfuscation"), "stream_options.include_obfuscation", False)
        # A background response is an ordinary job, without an interactive deadline.
        defaults = JobSpec() if body.get("background") is True else self._service.defaults(tier)
        response = read_response(body, defaults)
        said = (response.spec.request or {}) | {"service_tier": tier}
        return _Asked(replace(response, spec=replace(response.spec, request=said)), stream, tier)

    async def _going_on(self, caller: Caller, asked: ResponseRequest) -> JobSpec:
        """Return the job with the conversation before it; raises HttpError, also for another caller's
        response."""
        spec = asked.spec
        if asked.previous is None:
            return spec
        job = await self._find(caller, asked.previous, FIELD)
        instructions = bool((spec.request or {}).get("instructions"))

        def messages() -> list[JsonObject]:
            return continued(conversation_of(job), spec.messages or [], instructions)

        return replace(spec, messages=await self._service.run(messages))

    async def _find(self, caller: Caller, named: str, param: str | None = None) -> Job:
        """Return a caller's stored response; raises HttpError, also for another caller's."""
        try:
            if not named.startswith(PREFIX):
                raise JobNotFoundError
            job = await self._service.job(caller, named.removeprefix(PREFIX))
            if not (job.request or {}).get("store"):
                raise JobNotFoundError
        except JobNotFoundError:
            shown = printable(named, _LONGEST_ID)
            said = f"there is no response {shown!r}; one with store: false is not kept"
            raise HttpError(404, said, param=param, code="response_not_found") from None
        return job

    async def _model_of(self, job: Job) -> str:
        return job.model or await served_model(self._service, job.worker)

    async def _answer(self, job: Job) -> Response:
        body = response_body(job, await self._model_of(job))
        return JSONResponse(body, headers={"X-Request-ID": job.id} | origin(job))

    async def _followed(self, job: Job) -> Response:
        """Stream the events of a response that continues without its reader."""
        events = ResponseEvents(job, await self._model_of(job))
        return EventStream(job.id, self._events(job.id, events, []), on_close=lambda: None)

    async def _streamed(
        self, request: Request, job_id: str, *, background: bool, key: str | None
    ) -> Response:
        """Stream the events of a new response; raises HttpError if it is refused."""
        service = self._service
        job = await service.run(service.client.get, job_id)
        if background:
            return await self._followed(job)

        def leave() -> None:
            if key is None:  # with a key, the caller may return for the answer
                service.cancel_later(job_id)

        over: list[bool] = []
        try:
            events = ResponseEvents(job, await self._model_of(job))
            refusing = self._events(job_id, events, over, refuse=True)
            stream = await attended(request, begun(refusing), leave)
        except (NightmillError, HttpError):
            leave()
            raise
        return EventStream(job_id, stream, on_close=lambda: None if over else leave())

    async def _events(
        self, job_id: str, events: ResponseEvents, over: list[bool], *, refuse: bool = False
    ) -> AsyncIterator[str]:
        """Yield all events; `over` gets an item once the job has ended.

        With `refuse`, the first events wait for the text, and an earlier error is an HttpError.
        """
        first = list(events.first())
        try:
            while first and not refuse:
                yield typed_event(first.pop(0))
            async for found in with_pauses(
                self._service.followed(job_id, with_logprobs=events.with_logprobs)
            ):
                if isinstance(found, Job):
                    over.append(True)
                    if first and (failure := http_error_of_job(found)) is not None:
                        raise failure
                while first:
                    yield typed_event(first.pop(0))
                if found is None:
                    yield COMMENT
                    continue
                for one in events.last(found) if isinstance(found, Job) else events.piece(found[1]):
                    yield typed_event(one)
        except (NightmillError, HttpError) as error:
            if first:
                raise
            yield typed_event(events.error(http_error_of(error).body))  # too late for an HTTP status


def _check_included(request: Request) -> None:
    """Refuse values of `include` that are not supported."""
    query: Any = request.query_params
    for name in ("include", "include[]"):
        for value in query.getlist(name):
            check_neutral(name, value, INCLUDED, f"is not supported; known are {', '.join(INCLUDED)}")
