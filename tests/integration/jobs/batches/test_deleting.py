"""Deleting and pruning beside everybody else: nothing that is wanted goes, nobody goes in circles."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    BatchConflictError,
    BatchNotFoundError,
    InvalidRequestError,
    InvalidTransitionError,
    JobNotFoundError,
)
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.deletion import Deletion
from nightmill.jobs.sql.prune import Prune, Pruned
from tests.integration.jobs.batches.rows import finish, jobs_of
from tests.support.interleaving import before, wait_until_one_is_blocked
from tests.support.servers import Clock


@pytest.fixture
def other(server_settings: Settings, clock: Clock, client: Client) -> Iterator[Client]:
    """A second program."""
    with Client(server_settings, clock=clock) as made:
        yield made


# -- a batch that is being deleted ---------------------------------------------------------------


def begin_to_delete(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete four rows, and be broken off."""
    monkeypatch.setattr("nightmill.jobs.sql.deletion.GROUP", 4)
    assert next(Deletion(client.database).run(name)) == 4


def test_a_batch_that_is_being_deleted_takes_nothing_and_is_gone_at_the_next_try(
    client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    begin_to_delete(client, "night", monkeypatch)
    left = jobs_of(batch)
    assert len(left) == 6
    refused: list[tuple[str, Callable[[], object]]] = [
        ("batch", lambda: client.enqueue("prompt", batch="night")),
        ("name", lambda: client.submit_batch(file, name="night")),
        ("name", lambda: client.submit_batch(["prompt"], name="night")),
        ("batch", lambda: batch.retry_failed()),
        ("batch", lambda: client.retry(left[10].id)),
    ]
    for field, call in refused:
        with pytest.raises(BatchConflictError, match=f"^{field}: batch 'night' is being deleted") as caught:
            call()
        assert caught.value.field == field
    assert jobs_of(batch) == left
    assert batch.status().deleting_at is not None
    assert batch.delete() == 6
    with pytest.raises(BatchNotFoundError):
        batch.status()
    assert client.submit_batch(file, name="night").status().rows == 10


def test_a_batch_of_single_jobs_can_be_deleted_and_begun_again(client: Client, worker: Claims) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3, batch="open"))
    finish(worker, [client.get(job_id) for job_id in ids])
    assert client.get_batch("open").delete() == 3
    assert client.get(client.enqueue("prompt", batch="open")).state is JobState.QUEUED


def test_a_deletion_that_begins_while_rows_are_retried_stops_the_retry_or_is_refused(
    client: Client, other: Client, file: Path, worker: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry goes through the rows in groups: the deletion comes between two of them."""
    monkeypatch.setattr("nightmill.jobs.sql.batch_reading.GROUP", 4)
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    retrying = batch.store.retry_failed("night", None)
    ((_, first),) = next(iter(retrying)).items()
    with pytest.raises(InvalidTransitionError, match="'night' has 3 rows that are not finished"):
        other.get_batch("night").delete()
    finish(worker, [client.get(job_id) for job_id in first])
    assert other.get_batch("night").status().deleting_at is None
    Deletion(other.database).begin("night")
    with pytest.raises(BatchConflictError, match="'night' is being deleted"):
        list(retrying)
    assert {job.state for job in jobs_of(batch).values()} == {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.CANCELLED,
    }


def test_a_deletion_waits_for_a_retry_under_way_and_is_then_refused(
    client: Client, other: Client, file: Path
) -> None:
    """The rows are queued but not committed when the deletion looks: it must not take them for final."""
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    deleting: list[Future[int]] = []
    with ThreadPoolExecutor(1) as pool:

        def delete() -> None:
            deleting.append(pool.submit(other.get_batch("night").delete))
            wait_until_one_is_blocked(client.database)

        # The groups are queued again; the first statement after that drops their saved tokens.
        with before(client.database, "DELETE FROM partials", delete):
            assert batch.retry_failed() == 8
        with pytest.raises(InvalidTransitionError, match="8 rows that are not finished"):
            deleting[0].result(120)
    assert len(jobs_of(batch)) == 10
    batch.cancel()
    assert batch.delete() == 10


def test_rows_that_someone_queued_again_all_the_same_are_not_deleted(client: Client, file: Path) -> None:
    """As a client of an older version does, which does not know of the mark: an error, and no circle."""
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    deletion = Deletion(client.database)
    deletion.begin("night")
    with client.database.write() as connection:
        connection.exec_driver_sql(
            "UPDATE jobs SET state = 'queued', finished_at = NULL WHERE prompt IS NOT NULL"
        )
    with pytest.raises(InvalidTransitionError, match="'night' has 8 rows that are not finished"):
        deletion.group("night")
    assert len(jobs_of(batch)) == 10


def test_no_transaction_is_open_while_a_reader_of_the_deletion_takes_its_time(
    client: Client, other: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    monkeypatch.setattr("nightmill.jobs.sql.deletion.GROUP", 4)
    said = [other.enqueue("prompt") for _ in Deletion(client.database).run("night")]
    assert len(said) == 4 and other.stats()["state"] == {"queued": 4}


def test_two_who_delete_one_batch_both_end_well(
    client: Client, other: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit_batch(file, name="night").cancel()
    monkeypatch.setattr("nightmill.jobs.sql.deletion.GROUP", 4)
    first, second = Deletion(client.database).run("night"), Deletion(other.database).run("night")
    assert [next(first), next(second)] == [4, 4]
    assert [*first][-1] == 6 and [*second] == [4]
    with pytest.raises(BatchNotFoundError):
        client.get_batch("night")


# -- single jobs into a batch that is whole ------------------------------------------------------


def test_a_job_cannot_be_added_to_a_batch_that_was_submitted_whole(client: Client, file: Path) -> None:
    batch = client.submit_batch(file, name="night")
    with pytest.raises(InvalidRequestError) as caught:
        client.enqueue("x", batch="night")
    assert str(caught.value) == (
        "batch: 'night' was submitted as a whole, and takes no more jobs: choose another name"
    )
    assert caught.value.field == "batch"
    with pytest.raises(BatchConflictError) as middle:
        client.enqueue_many(["a", "b", {"prompt": "c", "batch": "night"}, "d"])
    assert str(middle.value).startswith("item 2: batch: 'night' was submitted as a whole")
    assert [client.get(job_id).prompt for job_id in middle.value.enqueued] == ["a", "b"]
    with Session(client.database.engine) as session, pytest.raises(BatchConflictError):
        client.enqueue("x", batch="night", session=session)
    assert (batch.status().rows, len(client.list_jobs())) == (10, 12)
    batch.cancel()
    assert batch.delete() == 10


def test_a_job_cannot_be_added_to_a_batch_that_is_submitted_at_the_same_time(
    client: Client, other: Client, file: Path
) -> None:
    """The batch is entered when the job is about to be."""
    enqueueing: list[Future[str]] = []
    with ThreadPoolExecutor(1) as pool:

        def enqueue() -> None:
            enqueueing.append(pool.submit(other.enqueue, "x", batch="night"))
            wait_until_one_is_blocked(client.database)

        # The name is entered, and not committed.
        with before(client.database, "SELECT batches.name, batches.format", enqueue):
            batch = client.submit_batch(file, name="night")
        with pytest.raises(BatchConflictError, match="'night' was submitted as a whole"):
            enqueueing[0].result(120)
    assert batch.status().rows == 10


# -- pruning -------------------------------------------------------------------------------------


def ended_long_ago(client: Client, file: Path, clock: Clock, *names: str) -> Prune:
    """Batches of which all rows were cancelled long ago, and who is to prune them."""
    for name in names:
        client.submit_batch(file, name=name).cancel()
        clock.advance(1)
    clock.advance(days=30)
    return Prune(client.batches.store, clock() - timedelta(days=10))


def test_a_batch_that_was_retried_since_it_was_chosen_is_kept_and_the_others_go(
    client: Client, worker: Claims, file: Path, clock: Clock
) -> None:
    prune = ended_long_ago(client, file, clock, "first", "retried", "last")
    batch = client.get_batch("retried")
    pruning = prune.run()
    assert next(pruning) == Pruned(10, 0)
    assert batch.retry_failed() == 8
    finish(worker, [job for job in jobs_of(batch).values() if job.state is JobState.QUEUED])
    assert list(pruning)[-1] == Pruned(20, 2)
    assert [kept.name for kept in client.list_batches()] == ["retried"]
    assert batch.status().succeeded == 8


def test_two_prunes_at_once_both_end_well_and_miss_nothing(
    client: Client, other: Client, file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.jobs.sql.deletion.GROUP", 4)
    prune = ended_long_ago(client, file, clock, "a", "b", "c")
    pruning = prune.run()
    assert next(pruning) == Pruned(4, 0)
    alone = list(Prune(other.batches.store, clock() - timedelta(days=10)).run())[-1]
    assert alone == Pruned(26, 3)
    assert list(pruning)[-1] == Pruned(4, 1), "it finds the batch that it was at gone, and skips the others"
    assert client.list_batches() == []


def test_a_single_job_that_was_chosen_cannot_be_retried_before_it_is_deleted(
    client: Client, other: Client, clock: Clock
) -> None:
    """Else it could succeed meanwhile, and its result be deleted."""
    job_id = client.enqueue("prompt")
    client.cancel(job_id)
    clock.advance(days=30)
    prune = Prune(client.batches.store, clock() - timedelta(days=10))
    retrying: list[Future[Job]] = []
    with ThreadPoolExecutor(1) as pool:

        def retry() -> None:
            retrying.append(pool.submit(other.retry, job_id))
            wait_until_one_is_blocked(client.database)

        with before(client.database, "DELETE FROM jobs", retry):
            assert list(prune.run())[-1] == Pruned(1, 0)
        with pytest.raises(JobNotFoundError):
            retrying[0].result(120)


@pytest.fixture
def postgres_client(postgres_settings: Settings, clock: Clock) -> Iterator[Client]:
    """A client on PostgreSQL, where transactions run side by side."""
    with Client(postgres_settings, clock=clock) as made:
        yield made


@pytest.mark.parametrize("moment", ["SELECT batches.name, batches.format", "INSERT INTO jobs"])
def test_a_job_may_come_into_an_empty_batch_while_that_is_pruned(
    postgres_client: Client, clock: Clock, moment: str
) -> None:
    old = postgres_client.enqueue("old", batch="b")
    postgres_client.cancel(old)
    clock.advance(days=30)
    with Client(postgres_client.settings, clock=clock) as other:
        prune = Prune(other.batches.store, clock() - timedelta(days=10))
        with before(postgres_client.database, moment, lambda: list(prune.run())):
            new = postgres_client.enqueue("new", batch="b")
    assert [job.id for job in postgres_client.list_jobs(batch="b")] == [new]
    assert postgres_client.get_batch("b").status().rows == 1


def test_a_key_whose_job_is_pruned_meanwhile_belongs_to_the_new_job(
    postgres_client: Client, clock: Clock
) -> None:
    settings = {"idempotency_key": "key"}
    old = postgres_client.enqueue("prompt", **settings)
    postgres_client.cancel(old)
    clock.advance(days=30)
    with Client(postgres_client.settings, clock=clock) as other:
        prune = Prune(other.batches.store, clock() - timedelta(days=10))
        with before(postgres_client.database, "SELECT jobs.idempotency_key", lambda: list(prune.run())):
            new, plain = postgres_client.enqueue_many([{"prompt": "prompt", **settings}, "plain"])
    assert {job.id for job in postgres_client.list_jobs()} == {new, plain}
    assert postgres_client.get(new).idempotency_key == "key"
    assert postgres_client.enqueue("prompt", **settings) == new
