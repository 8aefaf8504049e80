"""/v1/messages as in Anthropic's API: a message is the answer of a chat."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.anthropic.answer import MessageEvents, message_body
from nightmill.jobs.server.anthropic.request import MessageRequest, read_message
from nightmill.jobs.server.errors import HttpError, http_error_of, http_error_of_job
from nightmill.jobs.server.events import EventStream, begun, with_pauses
from nightmill.jobs.server.job_service import JobService, attended, idempotency_key
from nightmill.jobs.server.model_names import model_of
from nightmill.jobs.server.reusing import origin, with_reuse
from nightmill.jobs.server.tiers import Tier, asked_tier, tier_of
from nightmill.jobs.server.tokenizing import Tokenizing
from nightmill.jobs.server.typed_events import typed_event


class Messages:
    """Endpoints of /v1/messages."""

    def __init__(self, service: JobService, tokenizing: Tokenizing) -> None:
        self._service = service
        self._tokenizing = tokenizing

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        service = self._service
        caller = service.keys.caller(request)

        def read(body: JsonObject) -> tuple[Tier, MessageRequest]:
            tier = tier_of(body, caller.tier)
            return tier, read_message(body, service.defaults(tier))

        tier, asked = await service.bodies.read(request, caller.name, read)
        asked_tier.set(tier)
        spec, key = with_reuse(request, asked.spec), idempotency_key(request)
        if key is not None:
            spec = replace(spec, idempotency_key=key)
        job_id = await service.enqueue(caller, spec)

        def leave() -> None:
            if key is None:  # with a key, the caller may return for the answer
                service.cancel_later(job_id)

        if not asked.stream:
            job = await service.finished(request, job_id, cancel=key is None)
            if (error := http_error_of_job(job)) is not None:
                raise error
            body = message_body(job, await model_of(service, spec, job.worker))
            headers = {"X-Request-ID": job_id, "request-id": job_id}
            return JSONResponse(body, headers=headers | origin(job))
        over: list[bool] = []
        try:
            events = MessageEvents(
                await service.run(service.client.get, job_id), await model_of(service, spec)
            )
            stream = await attended(request, begun(self._events(job_id, events, over)), leave)
        except (NightmillError, HttpError):
            leave()
            raise
        return EventStream(job_id, stream, on_close=lambda: None if over else leave())

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: count the prompt tokens of a message."""
        caller = self._service.keys.caller(request)
        read = partial(read_message, defaults=JobSpec(), counted=True)
        spec = (await self._service.bodies.read(request, caller.name, read)).spec
        return JSONResponse({"input_tokens": await self._tokenizing.count(spec.model, spec, caller.name)})

    async def _events(self, job_id: str, events: MessageEvents, over: list[bool]) -> AsyncIterator[str]:
        """Yield all events; `over` gets an item once the job has ended.

        Raises HttpError for an error before the first event.
        """
        first = list(events.first())
        try:
            async for found in with_pauses(self._service.followed(job_id)):
                made: Iterable[JsonObject] = ({"type": "ping"},)
                if isinstance(found, Job):
                    over.append(True)
                    if (failure := http_error_of_job(found)) is not None:
                        raise failure
                    made = events.last(found)
                elif found is not None:
                    made = events.piece(found[1])
                while first:
                    yield typed_event(first.pop(0))
                for one in made:
                    yield typed_event(one)
        except (NightmillError, HttpError) as error:
            if first:
                raise
            yield typed_event(http_error_of(error).anthropic_body)  # too late for an HTTP status
