"""GET /health: this process answers. GET /ready: database and broker answer, and a worker lives."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.server.desk import Desk
from nightmill.jobs.sql.patience import until

_FRESH_SECONDS = 1.0  # everybody may ask, and asking costs two round trips
_ANSWER_SECONDS = 4.0  # for either; what takes longer hangs


class _Looking:
    """A question to a server on a thread of its own, as it may hang; asked again once it has ended."""

    def __init__(self, name: str, ask: Callable[[], dict[str, bool]]) -> None:
        self._ask = ask
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ready: {name}")
        self._asked: Future[dict[str, bool]] | None = None

    async def answer(self) -> dict[str, bool] | None:
        """What was found; None if there is no answer in time."""
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(self._ask)
        waiting = asyncio.wrap_future(self._asked)
        done, _ = await asyncio.wait({waiting}, timeout=_ANSWER_SECONDS)
        return waiting.result() if done else None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Health:
    """The two endpoints, which need no key and tell nothing but yes and no."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._asking = asyncio.Lock()
        self._database = _Looking("database", self._look_at_database)
        self._broker = _Looking("broker", self._look_at_broker)
        self._known: JsonObject = {}
        self._known_at = -_FRESH_SECONDS

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: what answers, and as `hangs` what neither answers nor refuses."""
        async with self._asking:
            if time.monotonic() >= self._known_at + _FRESH_SECONDS:
                self._known = await self._look()
                self._known_at = time.monotonic()
        return JSONResponse(self._known, 200 if self._known["ready"] else 503)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._database.close()
        self._broker.close()

    async def _look(self) -> JsonObject:
        database, broker = await asyncio.gather(self._database.answer(), self._broker.answer())
        found = {"database": False, "broker": False, "worker": False} | (database or {}) | (broker or {})
        hangs = [name for name, said in (("database", database), ("broker", broker)) if said is None]
        return {"ready": all(found.values())} | found | ({"hangs": hangs} if hangs else {})

    def _look_at_database(self) -> dict[str, bool]:
        found = {"database": False, "worker": False}
        # Somewhat longer than anybody waits for it here: then it is known that it hangs.
        with suppress(NightmillError), until(time.monotonic() + 2 * _ANSWER_SECONDS):
            found["worker"] = bool(self._desk.client.serving())
            found["database"] = True
        return found

    def _look_at_broker(self) -> dict[str, bool]:
        with suppress(NightmillError):
            self._desk.client.broker.ping()
            return {"broker": True}
        return {"broker": False}
