"""GET /v1/models: models served by live workers."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.job_service import JobService


class Models:
    """Endpoints about models."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def all(self, request: Request) -> Response:
        """GET /v1/models."""
        self._service.keys.caller(request)
        return JSONResponse({"object": "list", "data": list((await self._served()).values())})

    async def one(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._service.keys.caller(request)
        name = request.path_params["name"]
        served = await self._served()
        if name not in served:
            known = ", ".join(served) or "none"
            raise HttpError(
                404, f"no live worker serves {name!r}; served are: {known}", code="model_not_found"
            )
        return JSONResponse(served[name])

    async def _served(self) -> dict[str, JsonObject]:
        """Return by name, sorted, the models that are loaded, and those that a worker loads in their turn."""
        workers = await self._service.run(self._service.client.worker_store.serving)
        in_turn = await self._service.run(self._service.client.worker_store.could_serve)
        since = {worker.model: worker.started_at for worker in reversed(workers)}
        contexts: dict[str, list[int]] = {name: [] for name in since}
        for worker in workers:
            if worker.context_length is not None:
                contexts[worker.model].append(worker.context_length)
        loaded = frozenset(since)
        for worker in in_turn:
            for name in worker.models or ():
                since.setdefault(name, worker.started_at)
        return {
            name: {
                "id": name,
                "object": "model",
                "created": int(since[name].timestamp()),
                "owned_by": "nightmill",
                "max_model_len": min(contexts.get(name, ()), default=None),  # the smallest of its workers
                "loaded": name in loaded,
            }
            for name in sorted(since)
        }
