"""What goes wrong, as HTTP says it: a status, and OpenAI's error object.

The one border where errors of ours become answers. A stranger is told what is wrong with the request; what
concerns the server (its paths, its URLs) goes to the log.
"""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nightmill.jobs.contract import JsonObject, StopReason
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
from nightmill.jobs.job import Job
from nightmill.jobs.printable import printable

log = logging.getLogger("nightmill.server")

RETRY_SECONDS = 2
"""What Retry-After says where nothing better is known."""
_LONGEST_PATH = 200  # characters that are shown
_PASSING = (429, 503)
"""What is over after a while. OpenAI's clients repeat 408, 409, 429 and all from 500 on, unless the header
x-should-retry says otherwise: but a conflict stays one, and what came too late, was cancelled or broke the
workers would be computed all over again, as a new job each time."""
_LONGEST_MESSAGE = 2_000  # characters; what a request holds is quoted, and it may hold megabytes
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class HttpError(Exception):
    """An answer that is an error."""

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

    @property
    def body(self) -> JsonObject:
        """OpenAI's error object. What a request holds may stand in it, and need not be fit to be encoded."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = None if self.param is None else printable(self.param, _LONGEST_MESSAGE)
        error = {
            "message": printable(self, _LONGEST_MESSAGE),
            "type": kind,
            "param": param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(field: str, said: str) -> HttpError:
    """What a caller is told of a value that can never be taken."""
    return HttpError(400, f"{field}: {said}", param=field, code="invalid_value")


def http_error_of(error: Exception) -> HttpError:
    """What a caller is told of an error."""
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
            return HttpError(400, "the database does not take a value of this request", code="refused")
        case DatabaseError() | BrokerError():
            log.warning("%s", error)
            what = "database" if isinstance(error, DatabaseError) else "broker"
            return HttpError(503, f"the {what} does not answer; try again later", code="unavailable")
        case HTTPException(status_code=status, detail=detail):
            return HttpError(status, detail, headers=error.headers)
        case NightmillError():
            log.error("%s", error)
    return HttpError(500, "the server failed; its log says more", code="internal_error")


def http_error_of_job(job: Job) -> HttpError | None:
    """What a caller is told of a job that ended without an answer; None if it has one."""
    match job.stop_reason:
        case StopReason.DEADLINE:
            return HttpError(504, "the answer was not complete in time", code="deadline")
        case StopReason.CANCELLED:
            return HttpError(409, "the job was cancelled before the answer was complete", code="cancelled")
        case StopReason.ERROR:
            # What killed workers may be the server's fault; anything else lies in the request.
            status = 500 if job.failures else 400
            return HttpError(status, job.error or "the job failed", code="generation_failed")
    return None


async def answer_error(request: Request, error: Exception) -> Response:
    """For Starlette, which calls it for every error."""
    found = http_error_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        asked = f"{request.method} {printable(request.url.path, _LONGEST_PATH)}"
        found = HttpError(
            error.status_code,
            f"there is no {asked}; GET /openapi.json lists what there is",
            code="unknown_url",
            headers=headers,
        )
    return found.response()


def _allowed(request: Request) -> str:
    """The methods of this path: Starlette names those of the first route that has it."""
    path = request.scope["path"]
    routes = [
        route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(path)
    ]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def handlers() -> dict[Any, Any]:
    """What Starlette is to do about errors."""
    return dict.fromkeys((HTTPException, NightmillError, HttpError, Exception), answer_error)
