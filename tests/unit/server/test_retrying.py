"""OpenAI's client repeats a request only where that helps: nothing is computed several times for one call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from sqlalchemy import update

from nightmill.jobs.base.contract import PAST_CONTEXT, StopReason
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.server.errors import HttpError, http_error_of, http_error_of_job
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import wait_until
from tests.unit.server.conftest import Server

LONG: dict[str, Any] = {
    "model": "model",
    "prompt": "Once",
    "max_tokens": 150,
    "extra_body": {"ignore_eos": True},
}


def test_a_call_that_is_late_makes_one_job(start: Callable[..., Any]) -> None:
    with start(limits=ServerLimits(request_seconds=0.5)) as server:
        server.bench.runner.seconds = 0.05
        # Says who was first to see that it is late, the worker or the server.
        late = "not complete in time|did not finish in time"
        with pytest.raises(openai.InternalServerError, match=late) as caught:
            server.openai(max_retries=2).completions.create(**LONG)
        assert caught.value.status_code == 504
        assert len(server.client.list_jobs()) == 1


def test_a_call_whose_job_somebody_cancels_makes_one_job(server: Server) -> None:
    server.bench.runner.seconds = 0.05  # type: ignore[attr-defined]

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: server.openai(max_retries=2).completions.create(**LONG))
        (job,) = wait_until(server.client.list_jobs)
        server.client.cancel(job.id)

        def over() -> bool:
            server.bench.service.poll_cancellations()
            return call.done()

        wait_until(over)
        with pytest.raises(openai.ConflictError, match="cancelled"):
            call.result()
    assert [one.id for one in server.client.list_jobs()] == [job.id]


@pytest.mark.parametrize(("failures", "status"), [(3, 500), (0, 400)])
def test_a_job_that_killed_its_workers_is_not_handed_in_again(
    server: Server, failures: int, status: int
) -> None:
    job_id = server.client.enqueue("prompt")
    with server.client.database.write() as connection:
        connection.execute(
            update(JobRow).values(
                state="failed", stop_reason=StopReason.ERROR, failures=failures, error="all 3 attempts failed"
            )
        )
    error = http_error_of_job(server.client.get(job_id))
    assert error is not None
    assert (error.status, error.headers.get("x-should-retry")) == (
        status,
        "false" if status == 500 else None,
    )


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (f"the prompt has 9 tokens, which {PAST_CONTEXT}: ...", "context_length_exceeded"),
        ("the prompt has no tokens: give it some text", "generation_failed"),
    ],
)
def test_a_prompt_past_the_context_has_the_code_that_clients_look_for(
    server: Server, said: str, code: str
) -> None:
    job_id = server.client.enqueue("prompt")
    with server.client.database.write() as connection:
        connection.execute(update(JobRow).values(state="failed", stop_reason=StopReason.ERROR, error=said))
    error = http_error_of_job(server.client.get(job_id))
    assert error is not None and (error.status, error.code) == (400, code)


@pytest.mark.parametrize(
    ("status", "repeated"),
    [(400, None), (408, None), (409, "false"), (429, "true"), (500, "false"), (501, "false"), (503, "true")],
)
def test_what_passes_is_repeated_and_what_stays_is_not(status: int, repeated: str | None) -> None:
    headers = HttpError(status, "so it is").response().headers
    assert headers.get("x-should-retry") == repeated
    assert headers.get("retry-after") == ("2" if repeated == "true" else None)


def test_a_database_that_is_away_is_asked_again_and_a_fault_of_the_server_is_not() -> None:
    assert http_error_of(DatabaseUnreachableError("away")).headers["x-should-retry"] == "true"
    assert http_error_of(RuntimeError("a fault")).headers["x-should-retry"] == "false"
