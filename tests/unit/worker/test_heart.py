"""A heart beats while the model is loaded, and knows when it may find others dead."""

import threading
from datetime import timedelta
from typing import Any

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.service.heart import LOADING, Heart
from tests.support.servers import Clock, wait_until

STALE = 30.0


def row(client: Client) -> tuple[str, str | None]:
    (found,) = client.workers()
    return found.state, found.detail


@pytest.fixture
def claims(sqlite_client: Client) -> Claims:
    claims = Claims(sqlite_client.database, "a" * 32)
    claims.register("host", 1, "model", None, LOADING)
    return claims


def test_a_worker_beats_while_it_loads_and_tells_how_far_it_is(
    sqlite_client: Client, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart = Heart(claims, STALE)
    assert row(sqlite_client) == ("starting", "loading the model")
    failures = iter([True, True])
    beat = claims.beat

    def flaky(*arguments: Any) -> bool:
        if threading.current_thread().name == "heart" and next(failures, False):
            raise DatabaseUnreachableError
        return beat(*arguments)

    monkeypatch.setattr(claims, "beat", flaky)
    with heart.while_loading(0.01) as tell:
        tell("40% of 4.7 GB")
        wait_until(lambda: row(sqlite_client) == ("starting", "loading the model: 40% of 4.7 GB"))
    heart.beat(WorkerState.READY)
    assert row(sqlite_client) == ("ready", None)


def test_a_worker_that_never_served_leaves_no_row(sqlite_client: Client, claims: Claims) -> None:
    claims.withdraw()
    assert sqlite_client.workers() == []
    assert sqlite_client.worker_store.get("a" * 32) is None


def test_others_are_found_dead_only_by_who_has_lived_for_as_long(claims: Claims, clock: Clock) -> None:
    heart = Heart(claims, STALE)
    assert not heart.steady
    for _ in range(6):
        heart.beat(WorkerState.READY)
        assert not heart.steady
        clock.advance(5)
    heart.beat(WorkerState.READY)
    assert heart.steady


def test_after_a_pause_nobody_is_found_dead_until_all_could_beat_again(claims: Claims, clock: Clock) -> None:
    heart = Heart(claims, STALE)
    for _ in range(10):
        heart.beat(WorkerState.READY)
        clock.advance(5)
    assert heart.steady
    clock.advance(3600)
    assert not heart.steady  # before it has beaten again
    heart.beat(WorkerState.READY)
    assert not heart.steady  # and after
    for _ in range(6):
        clock.advance(5)
        heart.beat(WorkerState.READY)
    assert heart.steady


def test_a_worker_never_rescues_its_own_jobs(sqlite_client: Client, claims: Claims, clock: Clock) -> None:
    from nightmill.jobs.sql.sweep import Sweep

    job_id = sqlite_client.enqueue("prompt")
    assert len(claims.claim([job_id])) == 1
    clock.advance(3600)
    stale = timedelta(seconds=STALE)
    assert Sweep(sqlite_client.database).rescue(stale, rescuer=claims.worker_id) == []
    assert row(sqlite_client)[0] == "starting"
    assert Sweep(sqlite_client.database).rescue(stale) == [job_id]
