"""Rows that follow rows: held until the row before them has ended, filled once, and ended with it."""

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, or_, select, text, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchConflictError, InvalidTransitionError
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.integration.jobs.following.rows import (
    ask,
    finish,
    follow,
    registered,
    rows_of,
    states,
)
from tests.support.servers import Clock


def test_a_chain_of_three_waits_and_each_row_takes_the_answer_before(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    drafts = ask(client, system="Short.")
    judged = follow(client, choice=["1", "5"], column="rating")
    third = follow(client, "judged", "third", "{{ prior.messages }}Of {{ draft }}, rated {{ rating }}: why?")
    assert states(judged) == states(third) == ["queued held"] * 3
    assert (judged.status().held, drafts.status().held) == (3, 0)
    assert worker.claim([job.id for job in rows_of(judged) + rows_of(third)]) == []
    assert {row for item in Sweep(client.database).unsent(9) for row in item.job_ids} == set()
    first, second, last = rows_of(drafts)
    finish(worker, [second])
    assert worker.followers_due.is_set()
    assert states(judged) == ["queued held", "queued", "queued held"]
    (filled,) = [job for job in rows_of(judged) if not job.held]
    assert filled.messages == [{"role": "user", "content": "Rate poor:\ndraft 2"}]
    assert (filled.prior, filled.scheduled_at) == (second.id, None)
    (announced,) = Sweep(client.database).unsent(9)
    assert announced.job_ids == [filled.id]
    finish(worker, [first, last])
    assert judged.status().held == 0
    finish(worker, rows_of(judged), "5")
    assert rows_of(third)[0].messages == [
        {"role": "user", "content": "Rate fine:\ndraft 1"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Of draft 1, rated 5: why?"},
    ]
    finish(worker, rows_of(third), "because")
    third.write_results(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kept = ("id", "review", "draft", "rating", "answer")
    assert [rows[1][name] for name in kept] == [2, "poor", "draft 2", "5", "because"]


def test_a_row_whose_prior_fails_ends_with_a_code_of_its_own_and_so_do_those_behind_it(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    one, two, _three = rows_of(drafts)
    finish(worker, [one], stop_reason=StopReason.ERROR, error="it broke")
    client.cancel(two.id)
    assert states(judged) == states(third) == ["failed", "cancelled", "queued held"]
    assert [job.errors[-1]["code"] for job in rows_of(third)[:2]] == ["prior_failed", "prior_cancelled"]
    assert "row-1, failed (error): it broke" in str(rows_of(judged)[0].error)
    judged.write_errors(tmp_path / "errors.jsonl")
    written = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert [(line["code"], line["id"]) for line in written] == [("prior_failed", 1), ("prior_cancelled", 2)]
    drafts.cancel()
    assert states(third) == ["failed", "cancelled", "cancelled"]


def test_retrying_the_first_rows_holds_those_again_that_ended_with_them(
    client: Client, worker: Claims
) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    client.cancel(rows_of(judged)[1].id)  # somebody's wish, which a retry of others does not overrule
    finish(worker, rows_of(drafts), stop_reason=StopReason.ERROR, error="it broke")
    assert states(judged) == states(third) == ["failed", "cancelled", "failed"]
    client.retry(rows_of(drafts)[0].id)
    assert states(judged) == states(third) == ["queued held", "cancelled", "failed"]
    assert drafts.retry(temperature=0.5).rows == 2
    assert states(judged) == states(third) == ["queued held", "cancelled", "queued held"]
    assert worker.claim([job.id for job in rows_of(judged)]) == []
    finish(worker, rows_of(drafts))
    assert states(judged) == ["queued", "cancelled", "queued"]
    assert judged.retry_failed() == 1  # its prior has ended well meanwhile
    assert states(judged)[1] == "queued held"
    assert Sweep(client.database).settle_followers() == 1
    assert rows_of(judged)[1].messages == [{"role": "user", "content": "Rate poor:\ndraft 2"}]


def test_a_zombie_fills_nothing_and_nothing_is_filled_twice(client: Client, worker: Claims) -> None:
    drafts = ask(client)
    judged = follow(client)
    jobs = rows_of(drafts)
    zombies = worker.claim([job.id for job in jobs])
    worker.hand_back([(claim.job_id, claim.attempt) for claim in zombies[:2]])
    late = [Outcome(claim.job_id, claim.attempt, StopReason.EOS, "late", 3, 5) for claim in zombies]
    finish(registered(client, "b"), jobs[:1])
    assert worker.finish(late) == 1
    assert states(judged) == ["queued", "queued held", "queued"]
    assert [job.messages[0]["content"] for job in rows_of(judged) if job.messages] == [
        "Rate fine:\ndraft 1",
        "Rate so so:\nlate",
    ]
    before = rows_of(judged)
    assert Sweep(client.database).settle_followers() == 0
    assert worker.finish(late) == 0
    assert rows_of(judged) == before


def test_the_sweep_settles_what_a_worker_of_an_older_version_ended(client: Client) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    first, second, gone = rows_of(drafts)
    sweep = Sweep(client.database)
    assert sweep.settle_followers() == 0
    with client.database.read() as connection:  # what they claimed and announced: it is not due
        due = or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= client.database.now())
        query = select(func.count()).select_from(JobRow).where(JobRow.state == JobState.QUEUED, due)
        assert connection.execute(query).scalar_one() == 3
    ends = {"finished_at": client.database.now()}
    with client.database.write() as connection:  # as it did: the row alone
        ended = {"state": JobState.SUCCEEDED, "stop_reason": StopReason.EOS, "text": "old"} | ends
        connection.execute(update(JobRow).where(JobRow.id == first.id).values(ended))
        failed = {"state": JobState.FAILED, "stop_reason": StopReason.ERROR, "error": "no"} | ends
        connection.execute(update(JobRow).where(JobRow.id == second.id).values(failed))
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": gone.id})
    assert sweep.settle_followers() == 1
    assert states(judged) == ["queued", "failed", "failed"]
    assert states(third) == ["queued held", "failed", "failed"]
    assert "has been deleted" in str(rows_of(judged)[2].error)
    assert {row for item in sweep.unsent(9) for row in item.job_ids} == {rows_of(judged)[0].id}


def test_rows_that_follow_what_has_ended_are_due_at_once(client: Client, worker: Claims) -> None:
    drafts = ask(client)
    finish(worker, rows_of(drafts)[:2])
    judged = follow(client)
    assert states(judged) == ["queued", "queued", "queued held"]
    assert Sweep(client.database).unsent(9) == []  # they were announced like others
    again = follow(client)  # the same batch, entered once
    assert (again.name, again.status().rows) == ("judged", 3)
    with pytest.raises(BatchConflictError, match="other settings"):
        follow(client, template="{{ prior.text }}")


def test_a_deadline_ends_a_row_that_waits_and_those_behind_it(
    client: Client, worker: Claims, clock: Clock
) -> None:
    drafts = ask(client)
    judged = follow(client, deadline=timedelta(seconds=60), priority=7)
    third = follow(client, "judged", "third")
    clock.advance(seconds=61)
    assert Sweep(client.database).expire() == 3
    assert {str(job.stop_reason) for job in rows_of(judged)} == {"deadline"}
    assert states(third) == ["failed"] * 3
    finish(worker, rows_of(drafts))
    assert states(judged) == ["failed"] * 3
    with pytest.raises(InvalidTransitionError):
        follow(client, "drafts", "fourth").delete()


def test_rows_begin_when_their_batch_does_and_not_before(
    client: Client, worker: Claims, clock: Clock
) -> None:
    drafts = ask(client)
    judged = follow(client, scheduled_at=timedelta(hours=1))
    finish(worker, rows_of(drafts))
    assert not any(job.held for job in rows_of(judged))
    assert worker.claim([job.id for job in rows_of(judged)]) == []
    clock.advance(hours=1, seconds=1)
    assert len(worker.claim([job.id for job in rows_of(judged)])) == 3


@pytest.mark.parametrize("round_", range(3))
def test_no_row_is_overlooked_while_its_prior_ends(server_settings: Settings, round_: int) -> None:
    with Client(server_settings) as client, Client(server_settings) as other:
        rows = [{"x": str(n)} for n in range(600)]
        drafts = client.submit_batch(rows, name="drafts", template="{{ x }}")
        worker = registered(other, "a")
        ids = [job.id for job in rows_of(drafts)]
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait(120)
            for at in range(0, len(ids), 20):
                claims = worker.claim(ids[at : at + 20])
                worker.finish([Outcome(one.job_id, one.attempt, StopReason.EOS, "t", 1, 1) for one in claims])

        thread = threading.Thread(target=work)
        thread.start()
        barrier.wait(120)
        judged = follow(client, template="{{ prior.text }}")
        thread.join()
        assert judged.status().held == 0
        assert states(judged) == ["queued"] * 600


def test_rows_behind_a_batch_that_a_limit_stopped_wait_again_once_it_goes_on(
    client: Client, worker: Claims
) -> None:
    drafts = ask(client, budget="5-tokens")
    judged = follow(client)
    finish(worker, rows_of(drafts)[:1])
    assert Sweep(client.database).end_stopped() == 2
    assert states(judged) == ["queued", "failed", "failed"]
    assert rows_of(judged)[1].errors[-1]["code"] == "prior_failed"
    drafts.set_limits(budget="none")
    assert states(drafts) == ["succeeded", "queued", "queued"]
    assert states(judged) == ["queued", "queued held", "queued held"]
