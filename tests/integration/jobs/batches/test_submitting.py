"""Batches in SQL: submitted once however often, row for row, and read in order."""

import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    BatchConflictError,
    BatchFileError,
    BatchNotFoundError,
    InvalidParameterError,
    UnknownModelError,
    WaitTimeoutError,
)
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.sweep import Sweep
from tests.integration.jobs.batches.rows import finish, jobs_of, write
from tests.support.servers import Clock, free_port


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
    assert bad.error is not None and bad.error.startswith("best_of: is not supported")
    assert bad.errors == [{"code": "unsupported_field", "field": "best_of", "line": 8, "error": bad.error}]
    assert bad.finished_at == client.database.now()
    status = batch.status()
    assert (status.state, status.row_count, status.rows) == ("queued", 10, 10)
    assert status.states == {JobState.QUEUED: 8, JobState.FAILED: 2}
    assert {(group.rows, group.message.partition(":")[0]) for group in status.errors} >= {(1, "best_of")}
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


def test_large_rows_are_entered_in_smaller_groups(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightmill.jobs.batches.grouping.CHARACTERS_PER_TRANSACTION", 1000)
    insert = BatchStore.insert_rows
    groups: list[int] = []

    def counting(self: BatchStore, name: str, rows: Sequence[dict[str, Any]]) -> bool:
        groups.append(len(rows))
        return insert(self, name, rows)

    monkeypatch.setattr(BatchStore, "insert_rows", counting)
    chat = [{"role": "user", "content": "x" * 2000}]
    assert client.submit_batch(["x" * 500, "x" * 500, chat, "short"], name="b").status().rows == 4
    assert groups == [2, 1, 1]


def test_two_who_submit_a_file_at_once_enter_each_row_once(
    client: Client, server_settings: Settings, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(4000)])
    barrier = threading.Barrier(3)

    def submit() -> None:
        with Client(server_settings) as own:
            barrier.wait(120)
            own.submit_batch(path, name="night")

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
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
        ({"max_token": 1}, "max_token: is not supported: did you mean max_tokens"),
        ({"custom_id": "x"}, "custom_id: is not supported"),
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


def test_a_deadline_that_has_passed_is_refused_unless_the_batch_is_there(
    client: Client, file: Path, clock: Clock
) -> None:
    past = clock() - timedelta(seconds=1)
    for deadline in (past, timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(
            InvalidParameterError, match=r"^deadline: 202.* has passed \(it is .*\): give a lat"
        ):
            client.submit_batch(file, name="night", deadline=deadline)
    assert client.list_batches() == []
    dawn = clock() + timedelta(hours=8)
    batch = client.submit_batch(file, name="night", deadline=dawn)
    clock.advance(9 * 3600)
    again = client.submit_batch(file, name="night", deadline=dawn)  # the same command, after dawn
    assert jobs_of(again) == jobs_of(batch)
    with pytest.raises(InvalidParameterError, match="has passed"):
        batch.retry_failed(deadline=dawn)


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
