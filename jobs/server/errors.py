"""Mapping of errors to HTTP: a status, and OpenAI's error object.

Errors become responses only here. A response describes the fault of the request; internals of the server
(paths, URLs) go to the log.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nightmill.jobs.base.contract import PAST_CONTEXT, JsonObject, StopReason
from nightmill.jobs.base.printable import printable
from nightmill.jobs.errors import (
    BatchNotFoundError,
    BrokerError,
    DatabaseError,
    DatabaseRefusedError,
    IdempotencyConflictError,
    InvalidRequestError,
    InvalidTransitionError,
    JobNotFoundError,
    NightmillError,
    StreamChangedError,
    UnknownModelError,
    WaitTimeoutError,
)
from nightmill.jobs.reply.job import Job

log = logging.getLogger("nightmill.server")

RETRY_SECONDS = 2
"""Default of Retry-After."""
_LONGEST_PATH = 200  # characters that are shown
_PASSING = (429, 503)
"""Temporary errors. OpenAI's clients repeat 408, 409, 429 and everything from 500 on, unless the header
x-should-retry forbids it: but a conflict remains, and a job that expired, was cancelled or broke workers
would be computed again as a new job each time."""
_LONGEST_MESSAGE = 2_000  # characters, as messages quote requests, which may have megabytes
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


_ANTHROPIC_TYPES = _TYPES | {
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC = "/v1/messages"
"""Prefix of paths that answer in Anthropic's format."""


class HttpError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in _PASSING:
            self.headers.setdefault("Retry-After", str(RETRY_SECONDS))
            self.headers.setdefault("x-should-retry", "true")
        elif status == 409 or status >= 500:
            self.headers.setdefault("x-should-retry", "false")

    def of(self, param: str) -> "HttpError":
        """Return a copy about this parameter of the request."""
        return HttpError(self.status, f"{param}: {self}", param=param, code=self.code, headers=self.headers)

    @property
    def body(self) -> JsonObject:
        """Build OpenAI's error object. The message may quote the request, so it is made encodable."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = None if self.param is None else printable(self.param, _LONGEST_MESSAGE)
        error = {
            "message": printable(self, _LONGEST_MESSAGE),
            "type": kind,
            "param": param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def anthropic_body(self) -> JsonObject:
        """Build Anthropic's error object, with OpenAI's `param` and `code` in addition."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        error = self.body["error"] | {"type": kind}
        return {"type": "error", "error": error, "request_id": None}

    def response(self, path: str = "") -> Response:
        """Build the response in the format of this path."""
        body = self.anthropic_body if path.startswith(_ANTHROPIC) else self.body
        return JSONResponse(body, self.status, self.headers)


def invalid(field: str, said: str) -> HttpError:
    """Make the error for a value that is never accepted."""
    return HttpError(400, f"{field}: {said}", param=field, code="invalid_value")


def http_error_of(error: Exception) -> HttpError:
    """Map an error to a response."""
    match error:
        case HttpError():
            return error
        case UnknownModelError():
            return HttpError(404, str(error), param="model", code="model_not_found")
        case IdempotencyConflictError():
            return HttpError(409, str(error), param=error.field, code="idempotency_conflict")
        case InvalidRequestError():
            return HttpError(400, str(error), param=error.field, code=str(error.code))
        case JobNotFoundError():
            return HttpError(404, str(error), code="job_not_found")
        case BatchNotFoundError():
            return HttpError(404, "the rows of this batch were deleted", code="batch_not_found")
        case InvalidTransitionError():
            return HttpError(409, str(error), code="invalid_transition")
        case WaitTimeoutError():
            return HttpError(504, str(error), code="timeout")
        case StreamChangedError():
            return HttpError(409, str(error), code="stream_changed")
        case DatabaseRefusedError():
            log.warning("%s", error)
            return HttpError(400, "the database does not accept a value of this request", code="refused")
        case DatabaseError() | BrokerError():
            log.warning("%s", error)
            what = "database" if isinstance(error, DatabaseError) else "broker"
            return HttpError(503, f"the {what} cannot be used now; try again later", code="unavailable")
        case HTTPException(status_code=status, detail=detail):
            return HttpError(status, detail, headers=error.headers)
        case NightmillError():
            log.error("%s", error)
    return HttpError(500, "the server failed; its log says more", code="internal_error")


def http_error_of_job(job: Job) -> HttpError | None:
    """Map a job that ended without an answer to a response; None if it has one."""
    match job.stop_reason:
        case StopReason.DEADLINE:
            return HttpError(504, "the answer was not complete in time", code="deadline")
        case StopReason.BUDGET:
            return HttpError(409, job.error or "a limit of the batch ended the job", code="budget")
        case StopReason.CANCELLED:
            return HttpError(409, "the job was cancelled before the answer was complete", code="cancelled")
        case StopReason.ERROR:
            # A death of workers may be the server's fault; anything else is the request's.
            status = 500 if job.failures else 400
            code = "context_length_exceeded" if PAST_CONTEXT in (job.error or "") else "generation_failed"
            return HttpError(status, job.error or "the job failed", code=code)
    return None


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error; Starlette calls this for every error."""
    found = http_error_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        asked = f"{request.method} {printable(request.url.path, _LONGEST_PATH)}"
        found = HttpError(
            error.status_code,
            f"there is no {asked}; {_remedy(request)}",
            code="unknown_url",
            headers=headers,
        )
    return found.response(request.url.path)


def _remedy(request: Request) -> str:
    """Say what was probably meant by a path or a method that there is not."""
    methods = _methods(request, request.scope["path"])
    if methods:
        return f"this path takes {', '.join(sorted(methods - {'HEAD'}))}"
    path = re.sub("//+", "/", request.scope["path"])
    bare = re.sub("^(/v1)+(?=/|$)", "", path).rstrip("/")
    for meant in (f"/v1{bare}", bare):
        # Not for the names in a path, which may be anything.
        if meant != request.scope["path"] and request.method in _methods(request, meant, fixed=True):
            end = "/v1" if meant.startswith("/v1") else "the host and its port"
            shown = printable(meant, _LONGEST_PATH)
            return f"it is {request.method} {shown} (a client's base URL ends in {end})"
    return "GET /openapi.json lists what there is"


def _allowed(request: Request) -> str:
    """Return all methods of this path: Starlette names only those of the first matching route."""
    return ", ".join(sorted(_methods(request, request.scope["path"])))


def _methods(request: Request, path: str, *, fixed: bool = False) -> set[str]:
    """Return all methods of a path.

    fixed  of routes without parameters alone
    """
    routes = [
        route
        for route in request.app.routes
        if isinstance(route, Route)
        and route.path_regex.match(path)
        and not (fixed and route.param_convertors)
    ]
    return {method for route in routes for method in route.methods or ()}


def handlers() -> dict[Any, Any]:
    """Return Starlette's handlers of errors."""
    return dict.fromkeys((HTTPException, NightmillError, HttpError, Exception), answer_error)
