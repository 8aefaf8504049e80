"""`jobs.verify`: what it queues, compares, says and leaves behind. A thread plays the worker."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.batches.verifying import Verdict, Verification
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    BatchNotFoundError,
    InvalidParameterError,
    InvalidTransitionError,
    NotServedError,
    WaitTimeoutError,
)
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.claims import Claim, Claims, Outcome
from nightmill.jobs.sql.jobs import JOBS
from nightmill.jobs.sql.workers import WorkerStore
from tests.integration.jobs.verifying.worked import H100, H200, everything, outcome, run_all, tamper, working
from tests.support.servers import wait_until


def test_rows_that_give_their_texts_again_are_equal_and_nothing_is_left(
    client: Client, claims: Claims, night: str
) -> None:
    before = everything(client)
    told: list[int] = []
    with working(client, claims):
        found = client.verify(night, sample=5, on_rows=told.append)
    assert found.equal and found.count(Verdict.EQUAL) == len(found.rows) == 5
    assert {row.arithmetic_now for row in found.rows} == {str(H200)}
    assert all(0 <= done <= 5 for done in told)
    assert everything(client) == before


def test_copies_ask_for_the_same_and_for_nothing_else(client: Client, claims: Claims) -> None:
    chat = [{"role": "user", "content": "hello"}]
    times = {"deadline": timedelta(hours=1), "scheduled_at": timedelta(seconds=-1)}
    settings = {
        "max_tokens": 7,
        "top_k": 3,
        "stop": ["x"],
        "ignore_eos": True,
        "max_attempts": 2,
        "priority": 8,
    }
    client.enqueue(
        chat, batch="b", seed=5, custom_id="c", idempotency_key="k", metadata={"m": 1}, **settings, **times
    )
    run_all(client, claims)
    (original,) = client.list_jobs(batch="b")
    with working(client, claims):
        found = client.verify("b", keep=True)
    assert found.copies is not None and found.copies.startswith("verify:b:")
    (copy,) = client.list_jobs(batch=found.copies)
    same = ("prompt", "messages", "params", "max_attempts", "text")
    assert [getattr(copy, name) for name in same] == [getattr(original, name) for name in same]
    assert (copy.priority, copy.model, copy.attempt) == (0, "model", 1)  # of the worker that computed it
    assert copy.metadata == {"copied_from": original.id}
    assert (copy.custom_id, copy.idempotency_key, copy.deadline_at, copy.scheduled_at) == (None,) * 4
    assert client.get(original.id) == original


def test_copies_have_the_time_of_their_originals_and_rows_that_of_their_batch(
    client: Client, claims: Claims
) -> None:
    first = client.enqueue("one", batch="b")
    alone = client.enqueue("alone")
    second = client.enqueue("two", batch="b")  # of the same batch, as on the day after
    later = client.get(second).created_at + timedelta(days=1)
    with client.database.write() as connection:
        connection.execute(update(JOBS).where(JOBS.c.id == second).values(created_at=later))
    batch = client.get(first).created_at
    wanted = {first: batch, second: batch, alone: client.get(alone).created_at}

    def at_the_time_of_its_batch(claim: Claim) -> Outcome:
        return outcome(claim, text=str(claim.requested_at))

    run_all(client, claims, at_the_time_of_its_batch)
    assert {job.id: job.text for job in client.list_jobs()} == {name: str(at) for name, at in wanted.items()}
    with working(client, claims, at_the_time_of_its_batch):
        assert client.verify("b").equal


def test_a_text_that_was_tampered_with_is_a_defect_and_shown_where_it_parts(
    client: Client, claims: Claims, night: str
) -> None:
    job_id = tamper(client, 3, text="the text of p3 with SEED 3")
    with working(client, claims):
        found = client.verify(night)
    (row,) = [row for row in found.rows if row.verdict is not Verdict.EQUAL]
    assert (row.verdict, row.job_id, row.row, row.custom_id) == (Verdict.DEFECT, job_id, 3, "q-3")
    assert row.parting is not None and row.parting.at == len("the text of p3 with ")
    assert (row.parting.then, row.parting.now) == ("the text of p3 with SEED 3", "the text of p3 with seed 3")
    assert not found.equal and len(found.rows) == 9


def test_another_stop_reason_is_no_equal_row(client: Client, claims: Claims, night: str) -> None:
    tamper(client, 3, stop_reason="length")
    with working(client, claims):
        found = client.verify(night)
    (row,) = [row for row in found.rows if row.verdict is not Verdict.EQUAL]
    assert (row.verdict, row.parting) == (Verdict.DEFECT, None)
    assert (row.stop_reason_then, row.stop_reason_now) == ("length", "eos")


def test_another_arithmetic_explains_other_texts_and_is_named_for_equal_ones(
    client: Client, claims: Claims, night: str
) -> None:
    tamper(client, 1, text="other", arithmetic=str(H100))
    tamper(client, 2, arithmetic=str(H100))
    tamper(client, 3, text="other", arithmetic=None)
    tamper(client, 5, text="other", arithmetic="an abacus")
    with working(client, claims):
        found = client.verify(night)
    verdicts = {row.row: (row.verdict, row.differences) for row in found.rows}
    moved = ("device: NVIDIA H100, now NVIDIA H200",)
    assert verdicts[1] == (Verdict.EXPLAINED, moved)
    assert verdicts[2] == (Verdict.EQUAL, moved)
    assert verdicts[3] == (Verdict.UNRECORDED, ())
    assert verdicts[5] == (Verdict.EXPLAINED, (f"arithmetic: 'an abacus', now {str(H200)!r}",))
    assert found.count(Verdict.EQUAL) == 6


def test_rows_without_a_whole_result_are_left_out_until_they_were_retried(
    client: Client, claims: Claims
) -> None:
    first = {"a": StopReason.CANCELLED, "b": StopReason.DEADLINE, "c": StopReason.ERROR}

    def at_first(claim: Any) -> Outcome:
        reason = first.get(claim.prompt, StopReason.LENGTH)
        return outcome(claim, stop_reason=reason, error="broke" if claim.prompt == "c" else None)

    def later(claim: Any) -> Outcome:
        return outcome(claim, stop_reason=StopReason.LENGTH)

    client.enqueue_many(["a", "b", "c", "d"], batch="night", seed=1)
    run_all(client, claims, at_first)
    with working(client, claims, later):
        (row,) = client.verify("night").rows
    assert (row.verdict, row.stop_reason_then) == (Verdict.EQUAL, "length")
    assert client.get_batch("night").retry_failed() == 3
    assert {job.arithmetic for job in client.list_jobs(batch="night", state="queued")} == {None}
    run_all(client, claims, later)
    with working(client, claims, later):
        assert client.verify("night").count(Verdict.EQUAL) == 4


def test_copies_that_fail_are_said_not_to_be_compared(client: Client, claims: Claims, night: str) -> None:
    def fail(claim: Any) -> Outcome:
        return outcome(claim, "", stop_reason=StopReason.ERROR, error="no template", arithmetic=None)

    with working(client, claims, fail):
        found = client.verify(night, sample=2)
    assert [(row.verdict, row.error) for row in found.rows] == [(Verdict.NOT_COMPARED, "no template")] * 2


def test_rows_that_are_deleted_meanwhile_are_said_to_be_gone(
    client: Client, claims: Claims, night: str
) -> None:
    deleted = False

    def delete_first(claim: Any) -> Outcome:
        nonlocal deleted
        if not deleted:
            client.get_batch(night).delete()
            deleted = True
        return outcome(claim)

    with working(client, claims, delete_first):
        found = client.verify(night, sample=2)
    assert [row.error for row in found.rows] == ["the row has been deleted meanwhile"] * 2
    assert client.list_batches() == [] and client.list_jobs() == []


def test_a_batch_that_is_deleted_before_it_is_copied_has_nothing_to_verify(
    client: Client, claims: Claims, night: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = WorkerStore.serving

    def deleted(store: WorkerStore, model: str | None) -> list[Worker]:
        client.get_batch(night).delete()
        return serving(store, model)

    monkeypatch.setattr(WorkerStore, "serving", deleted)
    with pytest.raises(InvalidTransitionError, match="'night' has no row that has succeeded"):
        client.verify(night)
    assert client.list_batches() == [] and client.list_jobs() == []


def test_the_seed_of_the_sample_chooses_the_rows(client: Client, claims: Claims, night: str) -> None:
    def chosen(seed: int | None) -> Verification:
        with working(client, claims):
            return client.verify(night, sample=3, seed_of_sample=seed)

    first = chosen(None)
    again = chosen(first.seed_of_sample)
    assert [row.job_id for row in again.rows] == [row.job_id for row in first.rows]
    samples = {tuple(row.row for row in chosen(seed).rows) for seed in range(5)}
    assert len(samples) > 1
    assert all(4 not in rows and len(set(rows)) == 3 for rows in samples)


def test_what_cannot_be_verified_is_refused_before_anything_is_queued(
    client: Client, claims: Claims, night: str
) -> None:
    before = everything(client)
    with pytest.raises(BatchNotFoundError, match="no batch"):
        client.verify("nights")
    with pytest.raises(InvalidParameterError, match="sample: must be at least 1"):
        client.verify(night, sample=0)
    with pytest.raises(InvalidParameterError, match="priority: must be a whole number from 0 to 9"):
        client.verify(night, priority=10)
    claims.sign_off()
    with pytest.raises(
        NotServedError,
        match="no live worker serves 'model', which these rows are of: start one first, "
        "nightmill worker --model FILE --name model",
    ):
        client.verify(night)
    client.enqueue("queued", batch="waiting")
    with pytest.raises(InvalidTransitionError, match="'waiting' has no row that has succeeded"):
        client.verify("waiting")
    client.cancel_batch("waiting")
    client.get_batch("waiting").delete()
    assert everything(client)[0] == before[0]


@pytest.mark.parametrize("running", [False, True])
def test_who_gives_up_leaves_nothing_behind(
    client: Client, claims: Claims, night: str, running: bool
) -> None:
    before = everything(client)
    if not running:
        with pytest.raises(WaitTimeoutError, match="3 of 3 rows were not computed again in the time given"):
            client.verify(night, sample=3, timeout=0.2)
        assert everything(client) == before
        return
    taken: list[Any] = []

    def interrupt(done: int) -> None:
        if not taken:
            taken.extend(claims.claim([job.id for job in client.list_jobs(state="queued")][:1]))
            raise KeyboardInterrupt

    def stop_when_asked() -> None:
        wait_until(lambda: taken and claims.cancel_requests())
        claims.finish([outcome(claim, stop_reason=StopReason.CANCELLED) for claim in taken])

    worker = threading.Thread(target=stop_when_asked)
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        client.verify(night, sample=3, on_rows=interrupt)
    worker.join()
    assert everything(client) == before
