"""A job is cancelled, tried again, and found in lists."""

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    InvalidParameterError,
    InvalidTransitionError,
    JobNotFoundError,
)
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.jobs import Selection


def test_a_queued_job_is_cancelled_at_once_and_can_be_retried(client: Client) -> None:
    job_id = client.enqueue("prompt")
    assert client.cancel(job_id) is JobState.CANCELLED
    assert client.cancel(job_id) is JobState.CANCELLED
    assert Claims(client.database, "a" * 32).claim([job_id]) == []
    assert client.retry(job_id).state is JobState.QUEUED
    assert client.broker.queue_length(None) == 2
    with pytest.raises(
        InvalidTransitionError, match=f"job {job_id} is queued: only failed and cancelled jobs"
    ):
        client.retry(job_id)


def test_a_batch_is_cancelled_whole(client: Client) -> None:
    ids = client.enqueue_many(["prompt"] * 5, batch="b")
    other = client.enqueue("prompt", batch="other")
    Claims(client.database, "a" * 32).claim(ids[:2])
    assert client.cancel_batch("b") == (3, 2)
    assert client.stats("b")["state"] == {"running": 2, "cancelled": 3}
    assert client.get(other).state is JobState.QUEUED


def test_jobs_of_a_request_are_cancelled_together_but_for_those_that_have_ended(client: Client) -> None:
    request = client.enqueueing.enqueue_request([JobSpec.parse("prompt")] * 4, owner="alice")
    other = client.enqueueing.enqueue_request([JobSpec.parse("prompt")], owner="alice")
    assert other.job_ids == [other.request_id]
    claims = Claims(client.database, "a" * 32)
    ended, running, *queued = request.job_ids
    (claim, _) = claims.claim([ended, running])
    claims.finish([Outcome(ended, claim.attempt, StopReason.EOS, "text", 1, 1)])
    client.store.cancel_all(request.job_ids)
    jobs = [client.get(job_id) for job_id in request.job_ids]
    assert [job.state for job in jobs] == ["succeeded", "running", "cancelled", "cancelled"]
    assert [job.cancel_requested_at is not None for job in jobs] == [False, True, True, True]
    assert {job.request_id for job in jobs} == {request.request_id} and queued[0] != request.request_id
    assert client.get(other.request_id).state is JobState.QUEUED
    assert client.store.find(Selection(request_id=request.request_id)) == jobs


@pytest.mark.parametrize("call", ["get", "cancel", "retry", "wait"])
def test_an_id_of_no_job_is_named(sqlite_client: Client, call: str) -> None:
    with pytest.raises(JobNotFoundError, match="there is no job 'nothing'"):
        getattr(sqlite_client, call)("nothing")


def test_jobs_are_listed_newest_first_by_what_is_asked(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3, batch="b"))
    client.cancel(ids[1])
    assert [job.id for job in client.list_jobs()] == ids[::-1]
    assert [job.id for job in client.list_jobs(state="cancelled")] == [ids[1]]
    assert [job.id for job in client.list_jobs(batch="b", limit=1)] == [ids[2]]
    assert client.list_jobs(model="m") == []
    with pytest.raises(InvalidParameterError, match="state: 'done' is not one of queued, running, succeeded"):
        client.list_jobs(state="done")
