"""POST /v1/rerank and /v2/rerank, in Jina's and Cohere's shape: each document is a scoring job."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.rerank import Ranking
from nightmill.jobs.server.job_service import JobService, attended
from nightmill.jobs.server.model_names import model_of
from nightmill.jobs.server.several import ends_of
from nightmill.jobs.server.tiers import Tier, asked_tier, tier_of


class Reranking:
    """The endpoint."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/rerank."""
        service = self._service
        caller = service.keys.caller(request)

        def asked(body: JsonObject) -> tuple[Tier, Ranking]:
            tier = tier_of(body, caller.tier)
            return tier, Ranking(body, service.defaults(tier))

        tier, ranking = await service.bodies.read(request, caller.name, asked)
        asked_tier.set(tier)
        request_id, job_ids = await service.enqueue_request(caller, ranking.specs, "documents")
        jobs = await attended(
            request, ends_of(service, job_ids, "documents"), lambda: service.cancel_later(*job_ids)
        )
        model = await model_of(service, ranking.specs[0], jobs[0].worker)
        body = ranking.body(jobs, request_id, model)
        return JSONResponse(body, headers={"X-Request-ID": request_id})
