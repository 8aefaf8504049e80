"""For which model, from when and until when: what is refused, kept, and done about it."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    InvalidParameterError,
    UnknownModelError,
)
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import Clock


def test_a_deadline_that_has_passed_is_refused(sqlite_client: Client, clock: Clock) -> None:
    dawn = clock() + timedelta(hours=8)
    kept = sqlite_client.enqueue("prompt", deadline=dawn, idempotency_key="k")
    sqlite_client.cancel(kept)
    clock.advance(9 * 3600)
    for deadline in (dawn, timedelta(0), timedelta(seconds=-1)):
        for call in (
            lambda: sqlite_client.enqueue("prompt", deadline=deadline),  # noqa: B023
            lambda: sqlite_client.enqueue("prompt", deadline=deadline, idempotency_key="new"),  # noqa: B023
            lambda: sqlite_client.retry(kept, deadline=deadline),  # noqa: B023
        ):
            with pytest.raises(
                InvalidParameterError, match=r"^deadline: .* has passed \(it is .*: give a later"
            ):
                call()
    with pytest.raises(InvalidParameterError, match=r"^item 1: deadline: .* \(1 jobs before it are queued\)"):
        sqlite_client.enqueue_many(["a", {"prompt": "b", "deadline": dawn}])
    # a second enqueue with the key of a job that was in time returns that
    assert sqlite_client.enqueue("prompt", deadline=dawn, idempotency_key="k") == kept


def test_an_owners_second_enqueue_after_the_deadline_is_the_job_that_was_in_time(
    sqlite_client: Client, clock: Clock
) -> None:
    dawn = clock() + timedelta(hours=8)
    spec = JobSpec.parse({"prompt": "prompt", "deadline": dawn, "idempotency_key": "k"})
    kept = sqlite_client.enqueueing.enqueue_spec(spec, owner="alice")
    assert sqlite_client.enqueueing.enqueue_spec(spec, owner="alice") == kept
    assert sqlite_client.enqueueing.enqueue_spec(spec, owner="bob") != kept
    clock.advance(9 * 3600)
    assert sqlite_client.enqueueing.enqueue_spec(spec, owner="alice") == kept
    for owner in ("carol", None):  # whose key is another, though it reads alike
        with pytest.raises(InvalidParameterError, match=r"^deadline: .* has passed"):
            sqlite_client.enqueueing.enqueue_spec(spec, owner=owner)


def test_a_model_nobody_serves_is_refused_with_a_suggestion(client: Client) -> None:
    early = client.enqueue("before any worker was seen, every name may be right", model="qwne")
    Claims(client.database, "a" * 32).register("host", 1, "qwen2.5-0.5b", None)
    with pytest.raises(UnknownModelError) as caught:
        client.enqueue("prompt", model="qwen-2.5-0.5b")
    assert str(caught.value) == (
        "model: no worker has ever served 'qwen-2.5-0.5b'; known are qwen2.5-0.5b. "
        "Did you mean 'qwen2.5-0.5b'? For a new model, start its worker first: "
        "nightmill worker --model FILE --name qwen-2.5-0.5b"
    )
    assert caught.value.field == "model"
    served = client.enqueue("prompt", model="qwen2.5-0.5b")
    assert [client.get(job_id).model for job_id in (early, served)] == ["qwne", "qwen2.5-0.5b"]


def test_moments_are_kept_in_utc_and_spans_count_from_now(client: Client, clock: Clock) -> None:
    tokyo = timezone(timedelta(hours=9))
    first = client.enqueue(
        "p", deadline=datetime(2026, 1, 2, 9, tzinfo=tokyo), scheduled_at=timedelta(hours=1)
    )
    job = client.get(first)
    assert job.deadline_at == datetime(2026, 1, 2, 0, tzinfo=UTC)
    assert job.deadline_at is not None
    assert job.deadline_at.utcoffset() == timedelta(0)
    assert job.scheduled_at == clock() + timedelta(hours=1)


def test_a_scheduled_job_waits_for_its_time_and_the_sweep(client: Client, clock: Clock) -> None:
    job_id = client.enqueue("prompt", scheduled_at=timedelta(minutes=5))
    claims = Claims(client.database, "a" * 32)
    assert client.broker.queue_length(None) == 0
    assert claims.claim([job_id]) == []
    assert Sweep(claims.database).unsent(10) == []
    clock.advance(minutes=5)
    assert [one.job_ids for one in Sweep(claims.database).unsent(10)] == [[job_id]]
    assert [claim.job_id for claim in claims.claim([job_id])] == [job_id]


def test_a_job_past_its_deadline_is_not_begun_and_says_why(client: Client, clock: Clock) -> None:
    job_id = client.enqueue("prompt", deadline=timedelta(minutes=5))
    claims = Claims(client.database, "a" * 32)
    clock.advance(minutes=5)
    assert claims.claim([job_id]) == []
    assert Sweep(claims.database).expire() == 1
    job = client.get(job_id)
    assert (job.state, job.stop_reason) == ("failed", "deadline")
    assert job.error == "the deadline passed before a worker began"
    again = client.retry(job_id, deadline=timedelta(minutes=1))
    assert again.deadline_at == clock() + timedelta(minutes=1)
