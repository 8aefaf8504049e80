"""Several answers of a job in SQL: written with its end, fenced, read with it, and gone with it."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.tables import AnswerRow, JobRow
from tests.support.servers import Clock

ANSWERS = (
    Answer("one", StopReason.EOS, 2, 7),
    Answer("t\x00wo \ud800", StopReason.LENGTH, 5, 2**63 - 1),
    Answer("", StopReason.DEADLINE, 0, 9),
)


@pytest.fixture
def claims(client: Client) -> Claims:
    made = Claims(client.database, "a" * 32)
    made.register("host", 1, "model", None)
    return made


def outcome(job_id: str, reason: StopReason = StopReason.EOS, attempt: int = 1) -> Outcome:
    return Outcome(job_id, attempt, reason, "one", 4, 7, answers=ANSWERS)


def count(client: Client) -> int:
    with client.database.read() as connection:
        return connection.execute(select(func.count()).select_from(AnswerRow)).scalar_one()


def finished(client: Client, claims: Claims, reason: StopReason, jobs: int = 1) -> list[str]:
    ids = list(client.enqueue_many(["prompt"] * jobs, n=3))
    assert len(claims.claim(ids)) == jobs
    assert claims.claim_within(ids, 100) == ([], {})
    assert claims.finish([outcome(job_id, reason) for job_id in ids]) == jobs
    return ids


def test_answers_are_read_with_their_job_wherever_that_is_read(client: Client, claims: Claims) -> None:
    ids = finished(client, claims, StopReason.EOS, jobs=250)
    other = client.enqueue("prompt")
    claims.claim([other])
    claims.finish([Outcome(other, 1, StopReason.LENGTH, "alone", 4, 2)])
    stored = (ANSWERS[0], Answer("t\ufffdwo \ufffd", StopReason.LENGTH, 5, 2**63 - 1), ANSWERS[2])
    job = client.get(ids[0])
    assert (job.text, job.answers, job.completion_tokens) == ("one", stored, 7)
    (alone,) = client.get(other).answers
    assert (alone.text, alone.stop_reason, alone.completion_tokens) == ("alone", StopReason.LENGTH, 2)
    for found in (
        list(client.results(ids)),
        list(client.results(ids, order="finished")),
        client.list_jobs(limit=300)[1:],
    ):
        assert {one.answers for one in found} == {stored} and len(found) == 250


def test_a_worker_that_lost_its_job_writes_no_answer(client: Client, claims: Claims) -> None:
    job_id = client.enqueue("prompt", n=3)
    claims.claim([job_id])
    claims.hand_back([(job_id, 1)])
    assert claims.finish([outcome(job_id)]) == 0  # queued
    (claim,) = Claims(client.database, "b" * 32).claim([job_id])
    assert claim.params.n == 3
    assert claims.finish([outcome(job_id), outcome(job_id, attempt=2)]) == 0  # another's
    assert (count(client), client.get(job_id).answers) == (0, ())


def test_a_retry_and_deleting_take_the_answers_along(client: Client, claims: Claims, clock: Clock) -> None:
    first, second = finished(client, claims, StopReason.DEADLINE, jobs=2)
    assert count(client) == 6
    assert client.get(first).state is JobState.FAILED
    client.retry(first)
    assert (count(client), client.get(first).answers) == (3, ())
    (claim,) = claims.claim([first])
    assert claims.finish([outcome(first, attempt=claim.attempt)]) == 1
    assert [len(client.get(job_id).answers) for job_id in (first, second)] == [3, 3]
    clock.advance(3600)
    assert client.prune(timedelta(minutes=30)).jobs == 2
    assert count(client) == 0


def test_a_batch_that_is_tried_again_loses_the_answers_of_its_failed_rows_only(
    client: Client, claims: Claims
) -> None:
    batch = client.submit_batch([{"prompt": "p"}, {"prompt": "q"}], name="several", n=3)
    good, bad = (job.id for job in reversed(client.list_jobs(batch="several")))
    claims.claim([good, bad])
    claims.finish([outcome(good), outcome(bad, StopReason.DEADLINE)])
    assert [len(job.answers) for job in (*batch.results(), *batch.errors())] == [3, 3]
    assert batch.retry_failed() == 1
    assert [len(client.get(job_id).answers) for job_id in (good, bad)] == [3, 0]
    assert count(client) == 3


def test_as_many_jobs_are_claimed_as_have_room_with_all_their_answers(client: Client, claims: Claims) -> None:
    ids = list(client.enqueue_many(["prompt"] * 4, n=3))
    alone = client.enqueue("prompt")
    gone = client.enqueue("prompt")
    client.cancel(gone)
    scored = client.enqueue("prompt", score=[" one", " two"])
    order = [gone, *ids, alone, scored]
    taken, left = claims.claim_within(order, 7)
    assert [claim.job_id for claim in taken] == ids[:2]
    assert left == {ids[2]: 3, ids[3]: 3, alone: 1, scored: 2}  # nobody overtakes who came before
    taken, left = claims.claim_within(list(left), 1)
    assert [claim.job_id for claim in taken] == ids[2:3]  # the first, though it needs more
    taken, left = claims.claim_within(list(left), 4, most=2)
    assert ([claim.job_id for claim in taken], left) == ([ids[3], alone], {scored: 2})
    assert [claim.params.answers for claim in claims.claim(list(left))] == [2]


def test_a_row_of_an_older_client_tells_its_answers_once_it_is_claimed(
    client: Client, claims: Claims
) -> None:
    job_id = client.enqueue("prompt", n=3)
    with client.database.write() as connection:
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(answers=1))
    ((claim,), left) = claims.claim_within([job_id], 1)
    assert (claim.params.answers, left) == (3, {})
