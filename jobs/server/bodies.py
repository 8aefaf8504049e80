"""Reading of request bodies: JSON objects, bounded in size and time, parsed off the event loop.

Parsing a body takes time and memory in proportion to its size. Large ones are parsed on dedicated threads,
where they delay neither the event loop nor statements. The bytes of concurrent bodies are limited for each
key and for the server.
"""

import asyncio
import codecs
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.printable import printable
from nightmill.jobs.base.times import parse_moment
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_object
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.server.errors import HttpError, invalid

R = TypeVar("R")

MOST_BYTES = LINE_LIMIT
"""Largest body in bytes, the same as for a row of a file."""
LARGE = 16 << 10
"""Size in bytes from which a body is parsed on a thread."""
HELD_BYTES = 16 * MOST_BYTES
"""Most bytes of all bodies being received or parsed; further requests are asked to retry."""
HELD_OF_ONE = 4 * MOST_BYTES
"""Most bytes of such bodies of one key."""
BODY_SECONDS = 60.0
TIMES = ("scheduled_at", "deadline")
"""Fields of bodies that contain times."""
_MOST_FIELDS = 64
_THREADS = 2
_LONGEST_TIME = 100  # characters of a time


class Bodies:
    """A reader of request bodies."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bodies")
        self._lock = threading.Lock()
        self._held: Counter[str | None] = Counter()  # bytes, by key

    def close(self) -> None:
        """End the threads, each after its current body."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def object(self, request: Request, owner: str | None) -> JsonObject:
        """Read the JSON object of a request; raises HttpError."""
        return await self.read(request, owner, lambda body: body)

    async def read(self, request: Request, owner: str | None, make: Callable[[JsonObject], R]) -> R:
        """Read the JSON object of a request, and return the result of `make` on it.

        `make` runs where the body is parsed: on another thread if it is large. Raises HttpError, and any
        error of `make`.
        """
        return await self._read(request, owner, "application/json", "send JSON", partial(_made, make))

    async def form(self, request: Request, owner: str | None) -> dict[str, str]:
        """Read a form without files; the last of repeated fields counts. Raises HttpError."""
        kind = "application/x-www-form-urlencoded"
        return await self._read(request, owner, kind, "send a form", _fields)

    async def _read(
        self, request: Request, owner: str | None, kind: str, said: str, parse: Callable[[bytearray], R]
    ) -> R:
        """Read and parse a body of this media type; `said` names the expected type."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
            raise HttpError(415, f"{said}, with Content-Type: {kind}", code="unsupported_media_type")
        if (packed := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
            said = f"bodies packed as {printable(packed, 20)} are not read; {said} without Content-Encoding"
            raise HttpError(415, said, code="unsupported_media_type")
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and (len(announced) > 20 or int(announced) > MOST_BYTES):
            raise _too_large()
        body = bytearray()
        try:
            await self._receive(request, owner, body)
            if len(body) < LARGE:
                made = parse(body)
                self._let_go(owner, len(body))
                return made
            reading = self._threads.submit(parse, body)
        except BaseException:  # including a disconnect: the bytes are released
            self._let_go(owner, len(body))
            raise
        # A disconnect does not stop the parsing, which is bounded; until its end the bytes count.
        reading.add_done_callback(lambda _: self._let_go(owner, len(body)))
        return await asyncio.wrap_future(reading)

    async def _receive(self, request: Request, owner: str | None, body: bytearray) -> None:
        """Receive the body, counting each byte for its owner."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > MOST_BYTES:
                        raise _too_large()
                    self._hold(owner, len(chunk))
                    body += chunk
        except TimeoutError:
            said = f"the body did not come within {BODY_SECONDS:.0f} s"
            raise HttpError(408, said, code="slow_body") from None
        except ClientDisconnect:
            raise HttpError(400, "the body ended too early", code="incomplete_body") from None

    def _hold(self, owner: str | None, count: int) -> None:
        with self._lock:
            own = self._held[owner] + count
            if (owner is not None and own > HELD_OF_ONE) or self._held.total() + count > HELD_BYTES:
                said = "the server is reading as many bytes of bodies as it can; try again later"
                raise HttpError(503, said, code="busy")
            self._held[owner] = own

    def _let_go(self, owner: str | None, count: int) -> None:
        with self._lock:
            self._held[owner] -= count
            if not self._held[owner]:
                del self._held[owner]


def _made(make: Callable[[JsonObject], R], body: bytearray) -> R:
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    if not body or body.isspace():
        raise HttpError(400, "the body: is empty; send one JSON object", code=str(RowCode.INVALID_JSON))
    try:
        found = parse_object(body)
    except InvalidRequestError as error:
        said = str(error).partition("; ")[0].replace(" of the line", "")
        raise HttpError(400, f"the body: {said}; send one JSON object", code=str(error.code)) from None
    return make(found)


def _fields(body: bytearray) -> dict[str, str]:
    try:
        found = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError:
        raise HttpError(400, "the form cannot be read", code="invalid_form") from None
    return dict(found)


def read_times(body: JsonObject, now: datetime) -> None:
    """Replace texts in fields of times by moments; raises HttpError.

    A duration counts from `now`; a deadline's, from the scheduled begin.
    """
    for name in TIMES:
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, str):
            raise invalid(name, f"must be a time as a text, such as 8h, not {json_type(value)}")
        if len(value) > _LONGEST_TIME:
            raise invalid(name, f"must be a time of at most {_LONGEST_TIME} characters, such as 8h")
        now = body[name] = parse_moment(name, value, now)


def _too_large() -> HttpError:
    return HttpError(413, f"the body has more than {MOST_BYTES:,} bytes", code="too_large")
