"""Requests of several jobs: the end of all of them, or the error of the first that ends without a result."""

from collections.abc import AsyncIterator, Sequence

from nightmill.jobs.reply.job import Job
from nightmill.jobs.server.errors import http_error_of_job
from nightmill.jobs.server.events import merged
from nightmill.jobs.server.job_service import JobService


async def ends_of(service: JobService, job_ids: Sequence[str], field: str) -> list[Job]:
    """Return the jobs once all have a result; raises HttpError like `check_end`."""

    async def end(number: int) -> AsyncIterator[Job]:
        job = await service.end_of(job_ids[number])
        check_end(service, job_ids, number, job, field)
        yield job

    found = {number: job async for number, job in merged([end(number) for number in range(len(job_ids))])}
    return [found[number] for number in range(len(job_ids))]


def check_end(service: JobService, job_ids: Sequence[str], number: int, job: Job, field: str) -> None:
    """Refuse a request and cancel its other jobs if this one ended without a result; raises HttpError.

    field  the key of the request that has its prompts
    """
    failure = http_error_of_job(job)
    if failure is None:
        return
    if len(job_ids) > 1:
        service.cancel_later(*job_ids)
        failure = failure.of(f"{field}[{number}]")
    raise failure
