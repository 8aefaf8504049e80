"""Limits of batches: budgets and shares of failures, counted as rows end, and raised later."""

import json
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Thread

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchConflictError, InvalidParameterError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.limits import Limits
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from tests.integration.jobs.batches.rows import jobs_of, write
from tests.support.servers import Clock


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write(tmp_path / "many.jsonl", [{"prompt": f"p {number}"} for number in range(120)])


def queued(batch: Batch) -> list[Job]:
    return [job for job in jobs_of(batch).values() if job.state is JobState.QUEUED]


def end(worker: Claims, jobs: Iterable[Job], *, read: int = 3, wrote: int = 7) -> int:
    """Claim and finish jobs, each with so many tokens; return how many could be claimed."""
    claims = worker.claim([job.id for job in jobs])
    outcomes = [Outcome(c.job_id, c.attempt, StopReason.EOS, "t", read, wrote) for c in claims]
    worker.finish(outcomes)
    return len(claims)


def fail(worker: Claims, jobs: Iterable[Job], error: str) -> None:
    claims = worker.claim([job.id for job in jobs])
    worker.finish([Outcome(c.job_id, c.attempt, StopReason.ERROR, "", 3, 0, error=error) for c in claims])


def test_a_met_budget_ends_what_is_queued_and_leaves_what_runs(
    client: Client, worker: Claims, many: Path, clock: Clock
) -> None:
    batch = client.submit_batch(many, name="night", budget="100-tokens", deadline=timedelta(hours=8))
    other = client.submit_batch(many, name="other")
    rows = queued(batch)
    (flying,) = worker.claim([rows[0].id])
    assert end(worker, rows[1:10]) == 9  # 90 tokens
    assert batch.status().stopped_at is None
    assert end(worker, rows[10:11]) == 1
    status = batch.status()
    assert (status.spent, status.stopped_at) == ({"tokens": 100}, clock())
    assert end(worker, rows[11:]) == 0 and end(worker, queued(other)[:1]) == 1  # before any sweep
    assert Sweep(client.database).end_stopped() == 109 and Sweep(client.database).end_stopped() == 0
    worker.finish([Outcome(flying.job_id, flying.attempt, StopReason.EOS, "whole", 3, 50)])
    status = batch.status()
    assert (status.state, status.spent) == ("expired", {"tokens": 153})  # by what was in flight
    assert status.stop_reasons == {StopReason.EOS: 11, StopReason.BUDGET: 109}
    assert status.stopped_because == "its budget of 100 tokens is used up (100 tokens spent)"
    assert client.get(flying.job_id).text == "whole"
    row = jobs_of(batch)[100]
    assert (row.state, row.error) == (
        JobState.FAILED,
        "the batch stopped before a worker began: its budget of 100 tokens is used up (100 tokens spent)",
    )
    # What cannot run is not queued again; raised, it goes on with its deadline.
    with pytest.raises(BatchConflictError, match=r"100 tokens is used up .* raise it first"):
        batch.retry_failed()
    assert batch.set_limits(budget="120-tokens").stopped_because is not None
    clock.advance(hours=1)
    assert batch.set_limits(budget="1k-tokens").queued == 109
    status = batch.status()
    assert (status.stopped_because, status.states[JobState.QUEUED]) == (None, 109)
    assert {job.deadline_at for job in queued(batch)} == {clock() + timedelta(hours=7)}
    assert end(worker, queued(batch)[:85]) == 85
    assert batch.status().stopped_because == "its budget of 1,000 tokens is used up (1,003 tokens spent)"
    assert batch.set_limits(budget="none").queued == 0  # no sweep had ended any
    assert end(worker, queued(batch)) == 24 and batch.status().state == "completed"


def test_failures_above_their_share_stop_a_batch_and_are_named(
    client: Client, worker: Claims, many: Path
) -> None:
    batch = client.submit_batch(many, name="night", max_failures="10%")
    rows = queued(batch)
    fail(worker, rows[:10], "the prompt of 4,000 tokens is too long")
    end(worker, rows[10:44])
    worker.refuse(rows[44].id, "the row cannot be read")
    assert batch.status().stopped_at is None  # 45 rows are no sample
    end(worker, rows[45:50])
    status = batch.status()
    assert status.stopped_because == (
        "11 of 50 rows failed, more than the limit of 10%; 10 x the prompt of 4,000 tokens is too long; "
        "1 x the row cannot be read"
    )
    assert Sweep(client.database).end_stopped() == 70
    assert batch.status().stop_reasons[StopReason.BUDGET] == 70
    # The cause is gone: what failed and what was not tried is tried, and counted from here.
    assert batch.retry_failed() == 81
    assert end(worker, queued(batch)) == 81
    assert batch.status().state == "completed"


def test_a_worker_that_dies_of_rows_stops_their_batch_too(client: Client, worker: Claims, many: Path) -> None:
    batch = client.submit_batch(many, name="night", max_failures="0%", max_attempts=1)
    rows = queued(batch)
    end(worker, rows[:49])
    claims = worker.claim([rows[49].id])
    worker.give_up([(claim.job_id, claim.attempt) for claim in claims], "the engine died")
    said = batch.status().stopped_because or ""
    assert said.startswith("1 of 50 rows failed, more than the limit of 0%; 1 x all 1 attempts failed")


def test_texts_are_paid_for_once(client: Client, worker: Claims, many: Path) -> None:
    """What is extended costs what it grows by, what another row has computed nothing, a retried row again."""
    batch = client.submit_batch(many, name="night", budget="1M-tokens", max_tokens=7)
    rows = queued(batch)
    (claim, taken) = worker.claim([rows[0].id, rows[1].id])
    cut = Outcome(claim.job_id, claim.attempt, StopReason.LENGTH, "t", 3, 7)
    worker.finish(
        [cut, Outcome(taken.job_id, taken.attempt, StopReason.EOS, "t", 3, 7, reused_from=rows[0].id)]
    )
    assert batch.status().spent == {"tokens": 10}
    (late,) = worker.claim([rows[2].id])
    worker.finish([Outcome(late.job_id, late.attempt, StopReason.DEADLINE, "half", 3, 4)])
    client.retry(rows[2].id)
    end(worker, [rows[2]])
    assert batch.status().spent == {"tokens": 27}
    stale = Outcome(claim.job_id, claim.attempt, StopReason.EOS, "t", 3, 700)
    assert worker.finish([stale]) == 0 and batch.status().spent == {"tokens": 27}


def test_limits_given_later_know_what_was_used_before(client: Client, worker: Claims, many: Path) -> None:
    batch = client.submit_batch(many, name="night")
    rows = queued(batch)
    end(worker, rows[:10])
    fail(worker, rows[10:60], "no")
    (flying,) = worker.claim([rows[60].id])
    changed = batch.set_limits(budget="105-tokens", max_failures="90%")
    assert (changed.queued, changed.stopped_because) == (0, None)
    worker.finish([Outcome(flying.job_id, flying.attempt, StopReason.EOS, "t", 3, 7)])
    assert batch.status().stopped_because == "its budget of 105 tokens is used up (110 tokens spent)"
    assert (batch.set_limits(budget="none", max_failures="80%").stopped_because or "").startswith(
        "50 of 61 rows"
    )
    again = client.submit_batch(many, name="night", max_failures="90%")  # the command once more, with another
    assert again.status().stopped_at is None and again.status().max_failures == 0.9


def test_workers_that_finish_at_once_lose_no_token(client: Client, many: Path) -> None:
    batch = client.submit_batch(many, name="night", budget="1M-tokens")
    other = client.submit_batch(many, name="other", budget="1M-tokens")
    rows = queued(batch) + queued(other)
    workers = [Claims(client.database, letter * 32) for letter in "abcd"]
    barrier = Barrier(len(workers))

    def work(number: int) -> None:
        workers[number].register("host", number, "model", None)
        barrier.wait()
        for start in range(number * 10, len(rows), 40):
            end(workers[number], reversed(rows[start : start + 10]))

    threads = [Thread(target=work, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.status().spent for one in (batch, other)] == [{"tokens": 1200}] * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": "much"}, "budget: 'much' is not a budget; write 20M-tokens, 4gpu-hours or 5kWh"),
        ({"budget": "0-tokens"}, "give more than nothing"),
        ({"budget": "1-tokens,2-tokens"}, "name each measure once"),
        ({"budget": 5}, "budget: '5' is not a budget"),
        ({"max_failures": "5"}, "max_failures: '5' is not a share of rows; write a share"),
        ({"max_failures": "101%"}, "from 0% to 100%"),
    ],
)
def test_limits_that_cannot_be_are_refused_before_a_row_is_entered(
    client: Client, many: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        client.submit_batch(many, name="night", **settings)  # type: ignore[arg-type]
    assert client.list_batches() == []


def test_gpu_time_and_energy_count_what_every_attempt_cost(
    client: Client, worker: Claims, many: Path
) -> None:
    batch = client.submit_batch(many, name="night", budget="1gpu-hours,1kWh")
    rows = queued(batch)

    def cost(jobs: Iterable[Job], seconds: float, joules: float | None) -> None:
        claims = worker.claim([job.id for job in jobs])
        worker.finish([
            Outcome(c.job_id, c.attempt, StopReason.EOS, "t", 3, 7, gpu_seconds=seconds, energy_joules=joules)
            for c in claims
        ])  # fmt: skip

    cost(rows[:10], 100.0, 2e4)
    cost(rows[10:12], 50.0, None)  # a GPU that does not tell
    (claim,) = worker.claim([rows[12].id])
    key = (claim.job_id, claim.attempt)
    worker.hand_back([key], {key: (400.0, 1e5)})
    assert batch.status().spent == {"gpu_seconds": 1500.0, "joules": 3e5}
    cost([rows[12]], 100.0, 1e5)
    assert batch.status().spent == {"gpu_seconds": 1600.0, "joules": 4e5}
    cost(rows[13:14], 1.0, 3.2e6)
    assert batch.status().stopped_because == "its budget of 1 kWh is used up (1 kWh spent)"
    assert batch.set_limits(budget="2kWh").stopped_because is None
    assert batch.set_limits(budget="none").queued == 0
    assert batch.set_limits(budget="0.1gpu-hours").stopped_because == (
        "its budget of 0.1 GPU hours is used up (0.4447 GPU hours spent)"
    )


def test_amounts_are_read_as_people_write_them() -> None:
    read = Limits.of({"budget": "5kWh, 4gpu-hours,20M-tokens", "max_failures": "2.5 %"})
    assert read.budget == {"joules": 18e6, "gpu_seconds": 14400.0, "tokens": 20_000_000}
    assert read.max_failures == 0.025
    assert Limits.of({"budget": "250Wh,1.5k-tokens"}).budget == {"joules": 9e5, "tokens": 1500}


def test_commands_set_and_raise_budgets(
    client: Client, worker: Claims, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DATABASE", client.settings.database_url), ("BROKER", client.settings.broker_url)):
        monkeypatch.setenv(f"NIGHTMILL_{name}_URL", str(value))
    run = CliRunner().invoke
    made = run(main, ["batch", "submit", str(many), "--name", "night", "--budget", "95-tokens", "--json"])
    assert made.exit_code == 0 and json.loads(made.stdout)["budget"] == {"tokens": 95}, made.output
    batch = client.get_batch("night")
    end(worker, queued(batch)[:10])
    Sweep(client.database).end_stopped()
    shown = run(main, ["batch", "status", "night"]).output
    assert "budget     100 tokens of 95 tokens" in shown
    assert "stopped    its budget of 95 tokens is used up (100 tokens spent)" in shown and "to go on" in shown
    assert run(main, ["batch", "watch", "night"]).exit_code == 5  # as for a deadline
    assert "it is stopped" in run(main, ["batch", "budget", "night", "--budget", "99-tokens"]).output
    raised = run(main, ["batch", "budget", "night", "--budget", "2k-tokens"])
    assert raised.output == "night: 110 rows queued again\n"
    end(worker, queued(batch))
    run(main, ["batch", "budget", "night", "--budget", "99-tokens"])  # which ends no row any more
    shown = run(main, ["batch", "status", "night"]).output
    assert "night: completed\n" in shown and "to go on" not in shown
    assert "budget: is missing" in run(main, ["batch", "budget", "night"]).output
