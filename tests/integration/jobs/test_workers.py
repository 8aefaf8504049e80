"""Workers as programs see them, and whether a model is served."""

from datetime import timedelta

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Worker
from nightmill.jobs.sql.claims import Claims
from tests.support.servers import Clock


def test_workers_that_beat_and_do_not_drain_serve_their_model(client: Client, clock: Clock) -> None:
    states = {"a": WorkerState.STARTING, "b": WorkerState.READY, "c": WorkerState.DRAINING}
    for name, state in states.items():
        claims = Claims(client.database, name * 32)
        claims.register("host", 1, "demo", None, "loading")
        claims.beat(state)
    Claims(client.database, "d" * 32).register("host", 1, "other", None)
    assert {worker.id[0] for worker in client.worker_store.serving("demo")} == {"a", "b"}
    assert {worker.id[0] for worker in client.worker_store.serving()} == {"a", "b", "d"}
    clock.advance(client.settings.stale_seconds + 1)
    assert client.worker_store.serving() == []
    assert {worker.id[0]: worker.state for worker in client.workers()} == states | {"d": "starting"}


@pytest.mark.parametrize(
    ("state", "detail", "served"),
    [
        ("starting", "loading the model", False),
        ("lost", "loading the model", False),
        ("lost", None, True),
        ("ready", None, True),
        ("draining", None, True),
        ("stopped", None, True),
    ],
)
def test_a_worker_that_ended_while_it_loaded_never_served(
    clock: Clock, state: str, detail: str | None, served: bool
) -> None:
    now = clock()
    worker = Worker("a", "host", 1, None, "demo", WorkerState(state), now, now + timedelta(1), detail)
    assert worker.has_served is served
