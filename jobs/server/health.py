"""GET /health: this process answers. GET /ready: database and broker accept writes, a worker is alive."""

import asyncio
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.server.job_service import JobService
from nightmill.jobs.server.looking import SharedQuery
from nightmill.jobs.sql.patience import until
from nightmill.jobs.sql.probing import try_writing

_FRESH_SECONDS = 1.0  # cached, as anybody may ask, and a check costs two round trips
_ANSWER_SECONDS = 4.0  # for either; what takes longer hangs


class Health:
    """The two endpoints, which need no key and reveal only yes or no."""

    def __init__(self, service: JobService) -> None:
        self._service = service
        self._asking = asyncio.Lock()
        self._database = SharedQuery("ready: database", self._look_at_database, _ANSWER_SECONDS)
        self._broker = SharedQuery("ready: broker", self._look_at_broker, _ANSWER_SECONDS)
        self._known: JsonObject = {}
        self._known_at = -_FRESH_SECONDS

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: report usable services, and as `hangs` those that neither answer nor refuse."""
        async with self._asking:
            if time.monotonic() >= self._known_at + _FRESH_SECONDS:
                self._known = await self._look()
                self._known_at = time.monotonic()
        return JSONResponse(self._known, 200 if self._known["ready"] else 503)

    def close(self) -> None:
        """End the threads without waiting for them."""
        self._database.close()
        self._broker.close()

    async def _look(self) -> JsonObject:
        database, broker = await asyncio.gather(self._database.answer(), self._broker.answer())
        found = {"database": False, "broker": False, "worker": False} | (database or {}) | (broker or {})
        hangs = [name for name, said in (("database", database), ("broker", broker)) if said is None]
        return {"ready": all(found.values())} | found | ({"hangs": hangs} if hangs else {})

    def _look_at_database(self) -> dict[str, bool]:
        found = {"database": False, "worker": False}
        # Slightly longer than the wait here, which then reports a hang.
        with suppress(NightmillError), until(time.monotonic() + 2 * _ANSWER_SECONDS):
            workers = self._service.client.worker_store
            found["worker"] = bool(workers.serving() or workers.sleeping())
            try_writing(self._service.client.database)
            found["database"] = True
        return found

    def _look_at_broker(self) -> dict[str, bool]:
        with suppress(NightmillError):
            self._service.client.broker.try_writing()
            return {"broker": True}
        return {"broker": False}
