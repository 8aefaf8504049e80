"""How batches end: by the clock, by a cancellation; retried, deleted and pruned."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.progress import BatchProgress
from nightmill.jobs.errors import BatchNotFoundError, InvalidTransitionError
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.prune import Prune, Pruned
from nightmill.jobs.sql.sweep import Sweep
from tests.integration.jobs.batches.rows import finish, jobs_of, write
from tests.support.servers import Clock, RedisServer

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


def test_tokens_of_prompts_that_were_refused_are_not_counted_as_read(
    client: Client, worker: Claims, file: Path
) -> None:
    batch = client.submit_batch(file, name="night")
    rows = jobs_of(batch)
    reasons = {1: StopReason.EOS, 2: StopReason.ERROR, 3: StopReason.DEADLINE, 5: StopReason.DEADLINE}
    drawn = {1: 0, 2: 0, 3: 0, 5: 2}  # the third waited until it was over, the fifth has half an answer
    for claim in worker.claim([rows[number].id for number in reasons]):
        row = int(claim.prompt.removeprefix("prompt ")) if isinstance(claim.prompt, str) else 0
        worker.finish([Outcome(claim.job_id, claim.attempt, reasons[row], "t", 10**row, drawn[row])])
    assert batch.status().prompt_tokens == 10**1 + 10**5
    assert client.stats()["prompt_tokens"] == client.stats("night")["prompt_tokens"] == 10**1 + 10**5
    assert client.get(rows[2].id).prompt_tokens == 10**2  # but the job says how long its prompt was


def test_an_ended_batch_has_one_speed_wherever_it_is_told(
    client: Client, worker: Claims, file: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = client.submit_batch(file, name="night")
    rows = [job for job in jobs_of(batch).values() if not job.state.final]
    for job in rows:
        (claim,) = worker.claim([job.id])
        clock.advance(10)
        worker.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, "t", 3, 70)])
    clock.advance(30)  # in the last minute there was less of it
    assert batch.status().tokens_per_second == 7.0
    assert batch.status(errors=False).tokens_per_second is None  # not one of the last minute
    with BatchProgress("night") as line:
        assert batch.wait(on_status=line.show).tokens_per_second == 7.0
    assert "7 tokens/s" in capfd.readouterr().err


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
    monkeypatch.setattr("nightmill.jobs.sql.deletion.GROUP", 4)
    monkeypatch.setattr("nightmill.jobs.sql.prune.GROUP", 2)
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
