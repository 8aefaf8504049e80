"""What /v1/batches and /v1/night have in common: batches are listed, shown and cancelled there."""

from abc import ABC, abstractmethod

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.ids import IdSource
from nightmill.jobs.server.handing_in import HandingIn
from nightmill.jobs.server.listing import Page
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch


class BatchEndpoints(ABC):
    """The endpoints, but for how a batch is made."""

    def __init__(self, handing_in: HandingIn) -> None:
        self._desk = handing_in.desk
        self._handing_in = handing_in
        self._ids = IdSource()

    async def listed(self, request: Request) -> Response:
        """The caller's own, newest first."""
        caller = self._desk.keys.caller(request)
        page = Page.read(request.query_params, BATCH_PREFIX)
        found = await self._handing_in.page(caller, page)
        return JSONResponse(page.answer([await self._object(batch, listed=True) for batch in found]))

    async def shown(self, request: Request) -> Response:
        """One."""
        caller = self._desk.keys.caller(request)
        return JSONResponse(
            await self._object(await self._handing_in.find(caller, request.path_params["batch_id"]))
        )

    async def cancelled(self, request: Request) -> Response:
        """Cancel one."""
        caller = self._desk.keys.caller(request)
        return JSONResponse(
            await self._object(await self._handing_in.cancel(caller, request.path_params["batch_id"]))
        )

    @abstractmethod
    async def _object(self, batch: HttpBatch, *, listed: bool = False) -> JsonObject:
        """What is told of a batch, among others or of it alone."""
