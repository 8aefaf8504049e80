"""Bodies of requests: JSON objects of bounded size that come in bounded time."""

import asyncio
from datetime import datetime
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.jsonlines import LINE_LIMIT, parse_object
from nightmill.jobs.prompts import json_type
from nightmill.jobs.server.errors import HttpError, invalid
from nightmill.jobs.when import parse_moment

MOST_BYTES = LINE_LIMIT
"""As a row of a file may have."""
BODY_SECONDS = 60.0
TIMES = ("scheduled_at", "deadline")
"""Fields of bodies that are times."""
_MOST_FIELDS = 64
_LARGE = 1 << 16  # bytes; more is parsed on a thread


async def read_object(request: Request) -> JsonObject:
    """The JSON object that a request holds; raises HttpError."""
    body = await _body(request, "application/json", "send JSON")
    try:
        return parse_object(body) if len(body) < _LARGE else await asyncio.to_thread(parse_object, body)
    except InvalidRequestError as error:
        said = str(error).partition("; ")[0]
        raise HttpError(400, f"the body: {said}; send one JSON object", code=str(error.code)) from None


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form without files, of each the last; raises HttpError."""
    body = await _body(request, "application/x-www-form-urlencoded", "send a form")
    try:
        found = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError:
        raise HttpError(400, "the form cannot be read", code="invalid_form") from None
    return dict(found)


async def _body(request: Request, kind: str, said: str) -> bytes:
    """A body of that media type; `said` is what to send."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HttpError(415, f"{said}, with Content-Type: {kind}", code="unsupported_media_type")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MOST_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_SECONDS:.0f} s", code="slow_body") from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise HttpError(400, "the body ended too early", code="incomplete_body") from None
    return bytes(body)


def read_times(body: JsonObject, now: datetime) -> None:
    """Put moments in the place of texts that say when to begin and to end; raises HttpError.

    A duration counts from `now`, and that of the end from the begin.
    """
    for name in TIMES:
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, str):
            raise invalid(name, f"must be a time as a text, such as 8h, not {json_type(value)}")
        now = body[name] = parse_moment(name, value, now)


def _too_large() -> HttpError:
    return HttpError(413, f"the body has more than {MOST_BYTES:,} bytes", code="too_large")
