"""The header by which a caller asks for earlier answers, and the one that tells of them."""

from dataclasses import replace

from starlette.requests import Request

from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.reuse import Reuse
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.errors import invalid

ASKED = "X-Nightmill-Reuse"
TOLD = "X-Nightmill-Reused-From"


def reuse_asked(request: Request) -> str | None:
    """Return which earlier answers may stand for the request's; raises HttpError."""
    value = request.headers.get(ASKED)
    if value is not None and value not in set(Reuse):
        raise invalid(ASKED, f"must be {' or '.join(Reuse)}")
    return value


def with_reuse(request: Request, spec: JobSpec) -> JobSpec:
    """Return the spec of a job, with what the header asks for; raises HttpError."""
    reuse = reuse_asked(request)
    return spec if reuse is None else replace(spec, reuse=reuse)


def origin(*jobs: Job) -> dict[str, str]:
    """Return the header for an answer that was computed for other jobs; none if it was not."""
    ids = [job.reused_from for job in jobs]
    return {TOLD: ",".join(map(str, ids))} if ids and all(ids) else {}
