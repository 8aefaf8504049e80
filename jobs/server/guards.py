"""Middleware for all requests: access to the server, and the number of open requests."""

import asyncio
import ipaddress
import re
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightmill.jobs.errors import SettingsError
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.reusing import TOLD

_ORIGIN = re.compile(r"https?://[^\s/?#@A-Z]+")
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths for monitoring, served even when the server is full."""


class OpenRequests:
    """ASGI middleware that limits the number of open requests; others are asked to retry."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._open >= self._most:
            full = HttpError(429, f"{self._most} requests are open already; try again later", code="busy")
            await full.response(scope["path"])(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


class Unanswered:
    """ASGI middleware that asks callers to retry whose requests are unanswered when the server ends.

    The server cancels requests after its grace period, and would answer with a bare 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
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
            await HttpError(503, said, code="ending").response(scope["path"])(scope, receive, send)


class LocalOnly:
    """ASGI middleware for a server without keys: refuses requests that a web page could send through a
    browser.

    A page on another host may post to a loopback address, or its name may resolve to one (DNS rebinding). The
    first has another Origin, the second another Host. `origins` are the allowed ones.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
        if scope["type"] == "http" and (said := self._foreign(Headers(scope=scope))) is not None:
            error = HttpError(403, said, code="foreign_origin")
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _foreign(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            named, from_page = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
        except ValueError:  # for example an IPv6 address without its closing bracket
            named, from_page = None, ""
        if not is_loopback(named or ""):
            return "without keys this server answers to localhost alone: set NIGHTMILL_API_KEYS"
        if origin is not None and from_page != host and origin not in self._origins:
            return (
                "without keys this server answers to no page of another host: set NIGHTMILL_API_KEYS, or "
                "name the page with --cors-origin"
            )
        return None


def cross_origin(origins: Sequence[str]) -> Middleware:
    """Make middleware that lets pages of these origins (`*`: any) call the server from a browser, without
    affecting keys."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-ID", "Retry-After", "x-should-retry", TOLD],
        allow_private_network=True,
    )


def check_origins(origins: Sequence[str], *, keys: bool) -> None:
    """Raise SettingsError for invalid origins, and for `*` on a server without keys."""
    for origin in origins:
        if origin == "*" and not keys:
            raise SettingsError(
                "--cors-origin '*' lets any page in a browser use this server: set NIGHTMILL_API_KEYS, or "
                "name the origins"
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"--cors-origin {origin}: must be a scheme, a host and perhaps a port, as "
                "https://app.example.org or http://localhost:3000, in small letters and without a path"
            )


def is_loopback(host: str) -> bool:
    """Return True if only this machine's programs reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
