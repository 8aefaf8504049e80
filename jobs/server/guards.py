"""What every request passes: who may reach the server at all, and how many requests are open at once."""

import asyncio
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightmill.jobs.server.errors import HttpError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What those who watch over a server ask for, also of one that is full."""


class OpenRequests:
    """Lets so many requests be open at once; the others are asked to come again. ASGI middleware."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._open >= self._most:
            full = HttpError(429, f"{self._most} requests are open already; try again later", code="busy")
            await full.response()(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


class Unanswered:
    """Asks callers to come again whose answer is not there when the server ends. ASGI middleware.

    The server cancels what is still under way after its time for that, and would answer with a bare 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        except asyncio.CancelledError:
            if begun or scope["type"] != "http":
                raise
            said = "the server ends before the answer is complete; try again later"
            await HttpError(503, said, code="ending").response()(scope, receive, send)


class LocalOnly:
    """For a server without keys: refuses what a web page could send through somebody's browser.

    A page on another host may post to a loopback address, and its name may be made to mean one (DNS
    rebinding). The first has another Origin, the second another Host. ASGI middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and (said := _foreign(Headers(scope=scope))) is not None:
            await HttpError(403, said, code="foreign_origin").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _foreign(headers: Headers) -> str | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        named, from_page = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
    except ValueError:  # as for an IPv6 address without its end
        named, from_page = None, ""
    if not is_loopback(named or ""):
        return "without keys this server answers to localhost alone: set NIGHTMILL_API_KEYS"
    if origin is not None and from_page != host:
        return "without keys this server answers to no page of another host: set NIGHTMILL_API_KEYS"
    return None
