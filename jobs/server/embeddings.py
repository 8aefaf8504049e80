"""POST /v1/embeddings as in OpenAI's API. Bodies are parsed like rows of batch files."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.embedding_requests import embedding_jobs
from nightmill.jobs.formats.results import embeddings_body
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.job_service import JobService, attended, idempotency_key
from nightmill.jobs.server.model_names import model_of
from nightmill.jobs.server.several import ends_of
from nightmill.jobs.server.tiers import Tier, asked_tier, tier_of


class Embeddings:
    """The endpoint."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        service = self._service
        caller = service.keys.caller(request)

        def asked(body: JsonObject) -> tuple[Tier, list[JobSpec]]:
            tier = tier_of(body, caller.tier)
            return tier, embedding_jobs(body, service.defaults(tier))

        tier, specs = await service.bodies.read(request, caller.name, asked)
        asked_tier.set(tier)
        key = idempotency_key(request)
        if key is not None:
            specs = [replace(spec, idempotency_key=key) for spec in specs]
        request_id, job_ids = await service.enqueue_request(caller, specs, "input")

        def leave() -> None:
            if key is None:  # with a key, the caller may return for the answer
                service.cancel_later(*job_ids)

        jobs = await attended(request, ends_of(service, job_ids, "input"), leave)
        model = await model_of(service, specs[0], jobs[0].worker)
        # Two thousand embeddings are millions of digits: written here, they would delay all other answers.
        content = await asyncio.to_thread(_content, jobs, model)
        return Response(content, media_type="application/json", headers={"X-Request-ID": request_id})


def _content(jobs: Sequence[Job], model: str) -> bytes:
    return json.dumps(embeddings_body(jobs, model), separators=(",", ":")).encode()
