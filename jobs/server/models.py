"""GET /v1/models: what live workers serve. And POST /v1/embeddings, which nothing here computes."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.server.errors import HttpError


class Models:
    """The endpoints about models."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def all(self, request: Request) -> Response:
        """GET /v1/models."""
        self._desk.keys.caller(request)
        return JSONResponse({"object": "list", "data": list((await self._served()).values())})

    async def one(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._desk.keys.caller(request)
        name = request.path_params["name"]
        served = await self._served()
        if name not in served:
            known = ", ".join(served) or "none"
            raise HttpError(
                404, f"no live worker serves {name!r}; served are: {known}", code="model_not_found"
            )
        return JSONResponse(served[name])

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        self._desk.keys.caller(request)
        raise HttpError(
            400, "no model here computes embeddings: they all generate text", code="unsupported_endpoint"
        )

    async def _served(self) -> dict[str, JsonObject]:
        """By name, in order."""
        workers = await self._desk.run(self._desk.client.serving)
        since = {worker.model: worker.started_at for worker in reversed(workers)}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": int(since[name].timestamp()),
                "owned_by": "nightmill",
            }
            for name in sorted(since)
        }
