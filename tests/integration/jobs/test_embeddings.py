"""Embeddings in SQL: written with the end of their job, fenced, read with it, and gone with it."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql import reusing
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.reusing import Wanted
from nightmill.jobs.sql.tables import EmbeddingRow, JobRow
from tests.support.servers import Clock

DATA = bytes(range(256)) * 16  # 1,024 numbers, zeros and NaN among their bytes
ARITHMETIC = Arithmetic(runner="r", device="d", weights="w", kv="k", kernels="1", model="m")


@pytest.fixture
def claims(client: Client) -> Claims:
    made = Claims(client.database, "a" * 32)
    made.register("host", 1, "model", None)
    return made


def outcome(job_id: str, attempt: int = 1) -> Outcome:
    return Outcome(
        job_id,
        attempt,
        StopReason.EOS,
        "",
        4,
        0,
        embedding=DATA,
        arithmetic=str(ARITHMETIC),
        prompt_digest="d",
    )


def count(client: Client) -> int:
    with client.database.read() as connection:
        return connection.execute(select(func.count()).select_from(EmbeddingRow)).scalar_one()


def test_they_are_read_with_their_job_and_gone_with_it(client: Client, claims: Claims, clock: Clock) -> None:
    ids = list(client.enqueue_many([{"embed": "a"}] * 20, batch="b", reuse="exact"))
    text = client.enqueue("a")
    claims.claim([*ids, text])
    ended = [outcome(job_id) for job_id in ids]
    assert claims.finish([*ended, Outcome(text, 1, StopReason.EOS, "said", 4, 2)]) == 21
    assert [job.packed_embedding for job in client.results(ids)] == [DATA] * 20
    assert (client.get(text).packed_embedding, client.get(text).text) == (None, "said")
    (key,) = {key for key in _keys(client) if key is not None}
    found = reusing.find(
        client.database, [Wanted("x", 1, "exact", key, "d", None, False, False, embeds=True)], ARITHMETIC
    )
    assert [(one.job_id, one.embedding, one.reused_from in ids) for one in found] == [("x", DATA, True)]
    assert count(client) == 20
    clock.advance(3600)
    client.prune(timedelta(minutes=30))
    assert count(client) == 0


def _keys(client: Client) -> list[str | None]:
    with client.database.read() as connection:
        return list(connection.execute(select(JobRow.content_key)).scalars())


def test_a_worker_that_lost_its_job_writes_none(client: Client, claims: Claims) -> None:
    job_id = client.enqueue("a", embed=True)
    claims.claim([job_id])
    claims.hand_back([(job_id, 1)])
    assert claims.finish([outcome(job_id)]) == 0 and count(client) == 0  # queued
    claims.claim([job_id])
    assert claims.finish([outcome(job_id)]) == 0 and count(client) == 0
    assert claims.finish([outcome(job_id, attempt=2)]) == 1 and count(client) == 1
