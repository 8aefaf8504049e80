"""GET /health: this process answers. GET /ready: database and broker answer, and a worker lives."""

import asyncio
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.errors import NightmillError
from nightmill.jobs.server.desk import Desk

_FRESH_SECONDS = 1.0  # everybody may ask, and asking costs two round trips


class Health:
    """The two endpoints, which need no key and tell nothing but yes and no."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._asking = asyncio.Lock()
        self._known: dict[str, bool] = {}
        self._known_at = -_FRESH_SECONDS

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready."""
        async with self._asking:
            if time.monotonic() >= self._known_at + _FRESH_SECONDS:
                self._known = await self._desk.run(self._look)
                self._known_at = time.monotonic()
        ready = all(self._known.values())
        return JSONResponse({"ready": ready} | self._known, 200 if ready else 503)

    def _look(self) -> dict[str, bool]:
        found = {"database": False, "broker": False, "worker": False}
        client = self._desk.client
        with suppress(NightmillError):
            found["worker"] = bool(client.serving())
            found["database"] = True
        with suppress(NightmillError):
            client.broker.ping()
            found["broker"] = True
        return found
