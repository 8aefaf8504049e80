"""The common part of /v1/batches and /v1/night: list, show and cancel batches."""

from abc import ABC, abstractmethod

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.server.batch_submission import UploadedBatchSubmission
from nightmill.jobs.server.listing import Page
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch


class BatchEndpoints(ABC):
    """Endpoints of batches, except their creation."""

    def __init__(self, submission: UploadedBatchSubmission) -> None:
        self._service = submission.service
        self._submission = submission
        self._ids = IdSource()

    async def listed(self, request: Request) -> Response:
        """List the caller's batches, newest first."""
        caller = self._service.keys.caller(request)
        page = Page.read(request.query_params, BATCH_PREFIX)
        found = await self._submission.page(caller, page)
        return JSONResponse(page.answer([await self._object(batch, listed=True) for batch in found]))

    async def shown(self, request: Request) -> Response:
        """Show a batch."""
        caller = self._service.keys.caller(request)
        return JSONResponse(
            await self._object(await self._submission.find(caller, request.path_params["batch_id"]))
        )

    async def cancelled(self, request: Request) -> Response:
        """Cancel a batch."""
        caller = self._service.keys.caller(request)
        return JSONResponse(
            await self._object(await self._submission.cancel(caller, request.path_params["batch_id"]))
        )

    @abstractmethod
    async def _object(self, batch: HttpBatch, *, listed: bool = False) -> JsonObject:
        """Build the object of a batch, in a list or alone."""
