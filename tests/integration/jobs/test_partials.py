"""Saved tokens: written in groups, fenced, handed to the next attempt, gone when a job has ended."""

from datetime import timedelta

import pytest
from sqlalchemy import delete, func, select

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow, PartialRow
from tests.support.servers import Clock

PRINT = "f" * 64


def count_saved(client: Client) -> int:
    with client.database.read() as connection:
        return connection.execute(select(func.count()).select_from(PartialRow)).scalar_one()


@pytest.fixture
def claims(client: Client) -> Claims:
    made = Claims(client.database, "a" * 32)
    made.register("host", 1, "model", None)
    return made


def claim_and_save(client: Client, claims: Claims, count: int = 1) -> list[SavedTokens]:
    """Claim new jobs and save some tokens of each."""
    ids = list(client.enqueue_many(["prompt"] * count, max_attempts=1))
    saved = [SavedTokens(claim.job_id, claim.attempt, PRINT, (1, 2, 3)) for claim in claims.claim(ids)]
    assert claims.save(saved) == count == count_saved(client)
    return saved


def test_the_next_attempt_is_given_what_was_saved_last(client: Client, claims: Claims) -> None:
    (first,) = claim_and_save(client, claims)
    more = SavedTokens(first.job_id, 1, PRINT, (1, 2, 3, 2**31 - 1, 0))
    assert claims.save([more]) == 1
    assert claims.hand_back([(first.job_id, 1)]) == [first.job_id]
    (claim,) = Claims(client.database, "b" * 32).claim([first.job_id])
    assert (claim.attempt, claim.saved) == (2, more)


def test_large_groups_are_saved_whole(client: Client, claims: Claims) -> None:
    saved = claim_and_save(client, claims, 1100)
    longer = [SavedTokens(one.job_id, 1, PRINT, tuple(range(300))) for one in saved]
    assert claims.save(longer) == 1100
    assert count_saved(client) == 1100


def test_a_worker_that_lost_its_job_saves_nothing(client: Client, claims: Claims, clock: Clock) -> None:
    (first,) = claim_and_save(client, claims)
    assert claims.hand_back([(first.job_id, 1)])
    assert claims.save([SavedTokens(first.job_id, 1, PRINT, (9, 9, 9, 9))]) == 0  # queued
    (claim,) = Claims(client.database, "b" * 32).claim([first.job_id])
    assert claims.save([SavedTokens(first.job_id, 1, PRINT, (9, 9, 9, 9))]) == 0  # another's
    assert claims.save([SavedTokens(first.job_id, 2, PRINT, (9, 9, 9, 9))]) == 0
    assert claim.saved == first


@pytest.mark.parametrize(
    "ending",
    ["finish", "finish with error", "give up", "rescue", "cancel", "cancel batch", "expire", "hand back"],
)
def test_a_job_that_has_ended_keeps_no_tokens_and_a_retry_begins_afresh(
    client: Client, claims: Claims, clock: Clock, ending: str
) -> None:
    job_id = client.enqueue("prompt", batch="b", max_attempts=1, deadline=timedelta(hours=1))
    claims.claim([job_id])
    assert claims.save([SavedTokens(job_id, 1, PRINT, (1, 2, 3))]) == 1
    match ending:
        case "finish":
            claims.finish([Outcome(job_id, 1, StopReason.DEADLINE, "text", 1, 3)])
        case "finish with error":
            claims.finish([Outcome(job_id, 1, StopReason.ERROR, "", 1, 3, "it broke")])
        case "give up":
            claims.give_up([(job_id, 1)], "the engine failed")
        case "rescue":
            clock.advance(60)
            assert Sweep(client.database).rescue(timedelta(seconds=30)) == []
        case "cancel":
            claims.hand_back([(job_id, 1)])
            client.cancel(job_id)
        case "cancel batch":
            claims.hand_back([(job_id, 1)])
            client.cancel_batch("b")
        case "expire":
            claims.hand_back([(job_id, 1)])
            clock.advance(7200)
            assert Sweep(client.database).expire() == 1
        case "hand back":
            client.cancel(job_id)
            claims.hand_back([(job_id, 1)])
    assert client.get(job_id).state.final
    assert count_saved(client) == 0
    client.retry(job_id)
    (claim,) = claims.claim([job_id])
    assert claim.saved is None


def test_ending_one_job_leaves_the_tokens_of_others(client: Client, claims: Claims) -> None:
    first, second = claim_and_save(client, claims, 2)
    claims.finish([Outcome(first.job_id, 1, StopReason.EOS, "text", 1, 3)])
    claims.hand_back([(second.job_id, 1)])
    (claim,) = claims.claim([second.job_id])
    assert claim.saved == second


def test_saved_tokens_go_with_the_row(client: Client, claims: Claims) -> None:
    claim_and_save(client, claims)
    with client.database.write() as connection:
        connection.execute(delete(JobRow))
    assert count_saved(client) == 0
