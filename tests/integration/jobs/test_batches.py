"""Batches in SQL: submitted once however often, counted, cancelled, expired, retried, deleted and pruned."""

import json
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jobs.batch_store import BatchStore
from jobs.batches import Batch
from jobs.claims import Claims, Outcome
from jobs.client import Client
from jobs.contract import Job, JobState, StopReason
from jobs.errors import (
    BatchConflictError,
    BatchFileError,
    BatchNotFoundError,
    InvalidParameterError,
    InvalidTransitionError,
    UnknownModelError,
    WaitTimeoutError,
)
from jobs.prune import Prune, Pruned
from jobs.settings import Settings
from jobs.sweep import Sweep
from tests.servers import Clock, RedisServer, free_port


@pytest.fixture
def client(server_settings: Settings, clock: Clock) -> Any:
    """A client on SQLite and on PostgreSQL."""
    with Client(server_settings, clock=clock) as made:
        yield made


@pytest.fixture
def worker(client: Client) -> Claims:
    """A worker's side of the table."""
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    return claims


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Ten rows, of which the fourth and the eighth are bad."""
    rows: list[object] = [{"prompt": f"prompt {number}", "seed": number} for number in range(1, 11)]
    rows[3] = "{broken"
    rows[7] = {"prompt": "p", "n": 2}
    return write(tmp_path / "prompts.jsonl", rows)


def jobs_of(batch: Batch) -> dict[int, Job]:
    return {job.row or 0: job for job in batch._store.in_order(batch.name, list(JobState))}


def finish(worker: Claims, jobs: Sequence[Job], reason: StopReason = StopReason.EOS) -> None:
    for claim in worker.claim([job.id for job in jobs]):
        outcome = Outcome(claim.job_id, claim.attempt, reason, f"text of {claim.prompt}", 3, 5)
        worker.finish([outcome])


def test_every_row_of_a_file_becomes_a_job_and_bad_ones_fail_alone(client: Client, file: Path) -> None:
    batch = client.submit_batch(file, name="night", max_tokens=7, priority=8)
    rows = jobs_of(batch)
    assert sorted(rows) == list(range(1, 11))
    for number, job in rows.items():
        assert (job.batch, job.priority, job.params.max_tokens) == ("night", 8, 7)
        if number in (4, 8):
            continue
        assert (job.state, job.prompt, job.seed) == (JobState.QUEUED, f"prompt {number}", number)
        assert job.custom_id == f"row-{number}"
    bad = rows[8]
    assert (bad.state, bad.stop_reason, bad.prompt, bad.messages) == (
        JobState.FAILED,
        StopReason.ERROR,
        None,
        None,
    )
    assert bad.error is not None and bad.error.startswith("n: is not supported")
    assert bad.errors == [{"code": "unsupported_field", "field": "n", "line": 8, "error": bad.error}]
    assert bad.finished_at == client.database.now()
    status = batch.status()
    assert (status.state, status.row_count, status.rows) == ("queued", 10, 10)
    assert status.states == {JobState.QUEUED: 8, JobState.FAILED: 2}
    assert {(group.rows, group.message.partition(":")[0]) for group in status.errors} >= {(1, "n")}
    assert client.broker.queue_length(None) == 1


def test_what_a_row_says_wins_over_the_defaults_and_a_given_model_over_the_row(
    client: Client, tmp_path: Path
) -> None:
    row = {"custom_id": "a", "prompt": "p", "max_tokens": 3, "priority": 1, "model": "theirs"}
    path = write(tmp_path / "rows.jsonl", [row, {"prompt": "q"}])
    own = jobs_of(client.submit_batch(path, max_tokens=9, temperature=0.5))
    assert (own[1].model, own[2].model) == ("theirs", None)
    first, second = jobs_of(client.submit_batch(path, model="ours", max_tokens=9, temperature=0.5)).values()
    assert (first.model, first.priority, first.custom_id) == ("ours", 1, "a")
    assert (first.params.max_tokens, first.params.temperature) == (3, 0.5)
    assert (second.model, second.params.max_tokens, second.priority) == ("ours", 9, 5)


def test_a_row_for_a_model_that_no_worker_serves_is_an_error_of_that_row(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "model": "modle"}, {"prompt": "q"}])
    rows = jobs_of(client.submit_batch(path))
    assert [job.state for job in rows.values()] == [JobState.FAILED, JobState.QUEUED]
    assert rows[1].error is not None and "Did you mean 'model'?" in rows[1].error
    with pytest.raises(UnknownModelError, match="Did you mean 'model'"):
        client.submit_batch(path, model="modle")


def test_submitting_a_file_again_changes_nothing(client: Client, worker: Claims, file: Path) -> None:
    first = client.submit_batch(file, name="night", max_tokens=7)
    finish(worker, [jobs_of(first)[1]])
    before = jobs_of(first)
    again = client.submit_batch(file, name="night", max_tokens=7)
    assert jobs_of(again) == before
    assert client.submit_batch(file).name == client.submit_batch(file).name != "night"
    assert client.submit_batch(file, max_tokens=8).name != client.submit_batch(file).name


def test_a_name_belongs_to_one_file_one_model_and_one_set_of_parameters(
    client: Client, file: Path, tmp_path: Path
) -> None:
    client.submit_batch(file, name="night", max_tokens=7)
    other = write(tmp_path / "other.jsonl", [{"prompt": "p"}])
    with pytest.raises(BatchConflictError, match=r"with other content of the file and settings .*prompts.js"):
        client.submit_batch(other, name="night")
    with pytest.raises(BatchConflictError, match="with other settings"):
        client.submit_batch(file, name="night", max_tokens=8)
    with pytest.raises(BatchConflictError, match="with other model"):
        client.submit_batch(file, name="night", model="x", max_tokens=7)
    with pytest.raises(BatchConflictError, match="only files can be submitted again"):
        client.submit_batch(["a prompt"], name="night")
    client.enqueue("prompt", batch="open")
    with pytest.raises(BatchConflictError, match="there is a batch 'open' already"):
        client.submit_batch(file, name="open")


class _Dies(Exception):
    pass


def test_a_submission_that_was_broken_off_goes_on_where_it_stood(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(3000)])
    insert = BatchStore.insert_rows
    groups: list[int] = []

    def dying(self: BatchStore, name: str, rows: Sequence[dict[str, Any]]) -> bool:
        if len(groups) == 2:
            raise _Dies
        groups.append(len(rows))
        return insert(self, name, rows)

    with monkeypatch.context() as patched:
        patched.setattr(BatchStore, "insert_rows", dying)
        with pytest.raises(_Dies):
            client.submit_batch(path, name="night")
    batch = client.get_batch("night")
    status = batch.status()
    assert (status.state, status.row_count, status.rows) == ("submitting", None, sum(groups))
    before = jobs_of(batch)
    after = jobs_of(client.submit_batch(path, name="night"))
    assert sorted(after) == list(range(1, 3001))
    assert {number: after[number] for number in before} == before
    assert batch.status().row_count == 3000


def test_two_who_submit_a_file_at_once_enter_each_row_once(
    client: Client, server_settings: Settings, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(4000)])
    barrier = threading.Barrier(3)

    def submit() -> None:
        with Client(server_settings) as own:
            barrier.wait(30)
            own.submit_batch(path, name="night")

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(jobs_of(client.get_batch("night"))) == list(range(1, 4001))
    assert client.get_batch("night").status().row_count == 4000


def test_an_iterable_is_a_batch_too(client: Client) -> None:
    items = ["a", {"prompt": "b", "custom_id": "x"}, {"prompt": 3}, [{"role": "user", "content": "c"}]]
    batch = client.submit_batch(iter(items), max_tokens=3)
    rows = jobs_of(batch)
    assert [job.state for job in rows.values()] == ["queued", "queued", "failed", "queued"]
    assert [job.custom_id for job in rows.values()] == ["row-1", "x", "row-3", "row-4"]
    assert batch.name.startswith("batch-")
    assert (batch.status().source, batch.status().format) == (None, "jsonl")


def test_a_file_that_is_missing_and_bad_keywords_are_errors_before_anything_is_kept(
    client: Client, file: Path, tmp_path: Path, clock: Clock
) -> None:
    with pytest.raises(BatchFileError, match=r"nothing\.jsonl: there is no such file"):
        client.submit_batch(tmp_path / "nothing.jsonl")
    for keywords, message in (
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_token": 1}, "max_token: unknown parameter"),
        ({"custom_id": "x"}, "custom_id: unknown parameter"),
        ({"priority": 11}, "priority: "),
        ({"name": ""}, "batch: "),
        ({"deadline": datetime(2026, 1, 2)}, "deadline: must have a time zone"),
        ({"scheduled_at": datetime(2026, 1, 2)}, "scheduled_at: must have a time zone"),
        (
            {"scheduled_at": timedelta(hours=2), "deadline": timedelta(hours=1)},
            "deadline: 2026-01-01T23:00:00.00:00 is not after the time at which the batch begins",
        ),
    ):
        with pytest.raises(InvalidParameterError, match=f"^{message}"):
            client.submit_batch(file, **keywords)  # type: ignore[arg-type]
    assert client.list_batches() == []
    with pytest.raises(BatchNotFoundError, match="there is no batch 'night': `nightmill batch list` shows"):
        client.get_batch("night")


def test_results_and_errors_come_in_the_order_of_the_file(
    client: Client, worker: Claims, file: Path, clock: Clock
) -> None:
    batch = client.submit_batch(file, name="night")
    rows = jobs_of(batch)
    for number in (9, 2, 10, 1):
        clock.advance(1)
        finish(worker, [rows[number]])
    finish(worker, [rows[3]], StopReason.DEADLINE)
    assert [job.row for job in batch.results()] == [1, 2, 9, 10]
    assert [job.row for job in batch.errors()] == [3, 4, 8]
    assert next(job.text for job in batch.results()) == "text of prompt 1"
    with pytest.raises(WaitTimeoutError, match="'night' is queued with 7 of 10 rows done in the time given"):
        batch.wait(timeout=0.0)


def test_a_broker_that_is_away_delays_a_batch_and_loses_nothing(
    server_settings: Settings, file: Path, clock: Clock
) -> None:
    away = server_settings.model_copy(update={"broker_url": f"redis://127.0.0.1:{free_port()}/0"})
    with Client(away, clock=clock) as client:
        with pytest.warns(UserWarning, match="8 jobs are kept in the database"):
            batch = client.submit_batch(file, name="night")
        (announced,) = Sweep(client.database).unsent(100)
        assert sorted(announced.job_ids) == sorted(
            job.id for job in jobs_of(batch).values() if job.state is JobState.QUEUED
        )


# -- times ---------------------------------------------------------------------------------------


def test_a_scheduled_batch_begins_at_its_time(
    client: Client, worker: Claims, file: Path, clock: Clock
) -> None:
    batch = client.submit_batch(file, name="night", scheduled_at=clock() + timedelta(hours=3))
    sweep = Sweep(client.database)
    ids = [job.id for job in jobs_of(batch).values() if job.state is JobState.QUEUED]
    clock.advance(hours=3, seconds=-1)
    assert batch.status().state == "scheduled"
    assert sweep.unsent(100) == [] and worker.claim(ids) == []
    clock.advance(1)
    assert batch.status().state == "queued"
    assert [item.job_ids for item in sweep.unsent(100)] == [ids]
    assert len(worker.claim(ids)) == 8


def test_at_the_deadline_running_rows_keep_their_text_and_waiting_rows_expire(
    client: Client, worker: Claims, file: Path, clock: Clock
) -> None:
    batch = client.submit_batch(file, name="night", deadline=timedelta(hours=8))
    rows = jobs_of(batch)
    finish(worker, [rows[1]])
    (claim,) = worker.claim([rows[2].id])
    assert claim.deadline_at == clock() + timedelta(hours=8)
    clock.advance(hours=8, seconds=-1)
    assert Sweep(client.database).expire() == 0
    clock.advance(1)
    assert worker.claim([rows[3].id]) == []
    assert Sweep(client.database).expire() == 6
    worker.finish([Outcome(claim.job_id, claim.attempt, StopReason.DEADLINE, "half a te", 3, 4)])
    status = batch.status()
    assert status.state == "expired"
    assert status.stop_reasons == {StopReason.EOS: 1, StopReason.DEADLINE: 7, StopReason.ERROR: 2}
    cut = jobs_of(batch)[2]
    assert (cut.state, cut.text, cut.error) == (
        JobState.FAILED,
        "half a te",
        "the deadline passed after 4 tokens",
    )
    assert status.errors[0].rows == 6 and status.errors[0].message.startswith("the deadline passed before")


def test_retry_takes_up_only_what_lacks_a_result_and_could_have_one(
    client: Client, worker: Claims, file: Path, clock: Clock
) -> None:
    batch = client.submit_batch(file, name="night", deadline=timedelta(hours=1))
    before = jobs_of(batch)
    finish(worker, [before[1]])
    clock.advance(hours=1)
    Sweep(client.database).expire()
    assert batch.retry_failed(deadline=timedelta(hours=2)) == 7
    after = jobs_of(batch)
    for number, job in after.items():
        assert (job.id, job.seed) == (before[number].id, before[number].seed)
        if number == 1:
            assert job.state is JobState.SUCCEEDED
        elif number in (4, 8):
            assert job == before[number]
        else:
            assert (job.state, job.deadline_at, job.error) == (
                JobState.QUEUED,
                clock() + timedelta(hours=2),
                None,
            )
    assert batch.status().deadline_at == clock() + timedelta(hours=2)
    finish(worker, [job for job in after.values() if job.state is JobState.QUEUED])
    assert batch.status().state == "completed_with_errors"
    assert batch.retry_failed() == 0
    with pytest.raises(InvalidTransitionError, match="stands for a bad row of a file, and has no prompt"):
        client.retry(before[4].id)


# -- cancelling ----------------------------------------------------------------------------------


def test_cancelling_a_batch_ends_every_row_of_it_and_no_other(
    client: Client, worker: Claims, file: Path
) -> None:
    batch = client.submit_batch(file, name="night")
    other = client.submit_batch(file, name="other")
    rows = jobs_of(batch)
    finish(worker, [rows[1]])
    (claim,) = worker.claim([rows[2].id])
    assert batch.cancel() == (6, 1)
    assert worker.cancel_requests() == [(claim.job_id, claim.attempt)]
    assert batch.status().state == "running"
    worker.finish([Outcome(claim.job_id, claim.attempt, StopReason.CANCELLED, "half", 3, 4)])
    status = batch.status()
    assert (status.state, status.cancel_requested_at) == ("cancelled", client.database.now())
    assert status.states == {JobState.SUCCEEDED: 1, JobState.FAILED: 2, JobState.CANCELLED: 7}
    assert jobs_of(batch)[2].text == "half"
    assert other.status().states[JobState.QUEUED] == 8
    assert batch.retry_failed() == 7
    assert batch.status().cancel_requested_at is None
    assert batch.status().state == "queued"


def test_a_row_that_is_claimed_while_its_batch_is_cancelled_is_asked_to_stop(
    client: Client, worker: Claims, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = client.submit_batch(file, name="night")
    ids = [job.id for job in jobs_of(batch).values() if job.state is JobState.QUEUED]
    pages = BatchStore._pages

    def claiming(self: BatchStore, *arguments: Any) -> Any:
        worker.claim(ids[:3])
        return pages(self, *arguments)

    monkeypatch.setattr(BatchStore, "_pages", claiming)
    assert batch.cancel() == (5, 3)
    assert len(worker.cancel_requests()) == 3


def test_rows_entered_after_the_cancellation_are_cancelled_from_the_start(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(2500)])
    insert = BatchStore.insert_rows

    def cancelling(self: BatchStore, name: str, rows: Sequence[dict[str, Any]]) -> bool:
        entered = insert(self, name, rows)
        if rows[0]["row"] == 1:
            client.get_batch(name).cancel()
        return entered

    monkeypatch.setattr(BatchStore, "insert_rows", cancelling)
    status = client.submit_batch(path, name="night").status()
    assert (status.state, status.rows, status.states) == ("cancelled", 2500, {JobState.CANCELLED: 2500})


# -- deleting and pruning ------------------------------------------------------------------------


def test_a_batch_is_deleted_whole_and_only_when_it_is_over(
    client: Client, worker: Claims, file: Path
) -> None:
    batch = client.submit_batch(file, name="night")
    with pytest.raises(
        InvalidTransitionError, match="'night' has 8 rows that are not finished: wait, or can"
    ):
        batch.delete()
    assert len(jobs_of(batch)) == 10
    batch.cancel()
    keep = client.enqueue("prompt", batch="other")
    assert batch.delete() == 10
    with pytest.raises(BatchNotFoundError):
        batch.status()
    assert [job.id for job in client.list_jobs()] == [keep]
    assert client.submit_batch(file, name="night").status().states[JobState.QUEUED] == 8


def test_a_deletion_that_was_broken_off_can_be_finished_or_undone_by_submitting(
    client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = client.submit_batch(file, name="night")
    batch.cancel()
    monkeypatch.setattr("jobs.batch_store.GROUP", 4)
    next(batch._store.delete("night"))
    assert sorted(jobs_of(batch)) == [1, 2, 3, 4, 5, 6]
    assert sorted(jobs_of(client.submit_batch(file, name="night"))) == list(range(1, 11))
    assert batch.delete() == 10


def old_and_new(client: Client, worker: Claims, file: Path, clock: Clock) -> Callable[[], set[str]]:
    """Old and new jobs, finished and not; returns what tells the names of those that are there."""
    names: dict[str, str] = {}

    def named(name: str, job_ids: Sequence[str]) -> None:
        names.update(dict.fromkeys(job_ids, name))

    for age in ("old", "new"):
        single = client.enqueue("single")
        opened = client.enqueue("open", batch="open")
        alone = client.enqueue("alone", batch=f"{age} open")
        done = client.submit_batch(file, name=f"{age} done")
        part = client.submit_batch(file, name=f"{age} part")
        waiting = client.enqueue("waiting")
        named(f"{age} single", [single])
        named(f"{age} open", [opened, alone])
        named(f"{age} waiting", [waiting])
        for batch in (done, part):
            named(batch.name, [job.id for job in jobs_of(batch).values()])
        finish(worker, [client.get(job_id) for job_id in (single, opened, alone)])
        finish(worker, list(jobs_of(done).values()))
        finish(worker, list(jobs_of(part).values())[:3])
        clock.advance(days=30)
    return lambda: {names[job.id] for job in client.list_jobs(limit=1000)}


def test_pruning_deletes_what_ended_long_ago_and_nothing_that_has_not(
    client: Client, worker: Claims, file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.batch_store.GROUP", 4)
    monkeypatch.setattr("jobs.prune.GROUP", 2)
    there = old_and_new(client, worker, file, clock)
    everything = there()
    prune = Prune(client.batches.store, clock() - timedelta(days=45))
    assert prune.count() == Pruned(jobs=13, batches=1)
    assert there() == everything
    assert list(prune.run())[-1] == Pruned(jobs=13, batches=2)  # and the batch that it emptied
    assert there() == everything - {"old single", "old open", "old done"}
    assert {batch.name for batch in client.list_batches()} == {
        "open",
        "new open",
        "new done",
        "new part",
        "old part",
    }
    assert prune.count() == Pruned(0, 0)


def test_redis_is_not_needed_to_look_at_a_batch(
    client: Client, server_settings: Settings, file: Path, redis_server: RedisServer
) -> None:
    client.submit_batch(file, name="night")
    redis_server.stop()
    away = server_settings.model_copy(update={"broker_url": redis_server.url})
    with Client(away) as other:
        assert other.get_batch("night").status().rows == 10
        assert other.get_batch("night").cancel() == (8, 0)
