"""The triggers see every change that matters, on both databases, whoever makes it."""

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims
from tests.campaign import history
from tests.campaign.ledger import Promise
from tests.campaign.oracle import Evidence, judge
from tests.campaign.texts import answer


@pytest.fixture
def engine(server_settings: Settings) -> Iterator[Engine]:
    """The tests' own way into the database, past Nightmill."""
    made = create_engine(server_settings.resolved_database_url)
    history.install(made)
    yield made
    made.dispose()


def _set(engine: Engine, job_id: str, change: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE jobs SET {change} WHERE id = :id"), {"id": job_id})


def test_every_change_of_a_row_is_seen_and_a_planted_one_is_judged(
    server_settings: Settings, engine: Engine
) -> None:
    with Client(server_settings) as client:
        job_id = client.enqueue("prompt", seed=7)
        promise = Promise(job_id, answer("prompt", 7, {}))
        client.cancel(job_id)
        client.retry(job_id)
    _set(engine, job_id, "priority = 3")  # says nothing about the job's life
    _set(engine, job_id, "state = 'running', attempt = 1, worker = 'w'")
    _set(
        engine,
        job_id,
        "state = 'succeeded', stop_reason = 'eos', text = 'planted', finished_at = CURRENT_TIMESTAMP",
    )
    _set(engine, job_id, "text = 'planted again'")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    seen = list(history.read(engine))
    assert [(change.op, change.state) for change in seen] == [
        ("I", "queued"),
        ("U", "cancelled"),
        ("U", "queued"),
        ("U", "running"),
        ("U", "succeeded"),
        ("U", "succeeded"),
        ("D", "succeeded"),
    ]
    assert seen[1].finished_at is not None
    assert abs(seen[1].at - seen[1].finished_at) < 60, "the trigger's clock and Nightmill's are one"
    found = {violation.kind for violation in judge(Evidence({job_id: promise}, [], seen, frozenset()))}
    assert {"final-changed", "wrong-text", "deleted"} <= found


def test_the_moment_in_which_a_batch_begins_to_be_deleted_is_seen(
    server_settings: Settings, engine: Engine
) -> None:
    with Client(server_settings) as client:
        job_id = client.enqueue("prompt", batch="night")
        client.cancel(job_id)
        before = time.time()
        client.get_batch("night").delete()
    (marked,) = history.deletions(engine)["night"]
    assert before - 60 < marked < time.time() + 60


def test_who_falls_asleep_is_seen_with_what_is_in_its_hands(
    server_settings: Settings, engine: Engine
) -> None:
    with Client(server_settings) as client:
        claims = Claims(client.database, "a" * 32)
        claims.register("host", 1, "model", None)
        claims.beat(WorkerState.READY)
        claims.claim([client.enqueue("prompt")])
        claims.beat(WorkerState.SLEEPING)
        claims.beat(WorkerState.SLEEPING)  # it sleeps already
        claims.claim([client.enqueue("another")])
    assert [(worker, held) for worker, _, held in history.sleepers(engine)] == [("a" * 32, 1)]
    states = [change.worker_state for change in history.read(engine) if change.state == "running"]
    assert states == ["ready", "sleeping"]
