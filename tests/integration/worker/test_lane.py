"""Jobs that somebody waits for: they come past a night that fills the worker, by a list of their own."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import redis

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.messages.broker import lane_name
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.claims import Claim
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.service.interactive import InteractiveConsumer
from tests.support.servers import wait_until
from tests.unit.worker.bench import Bench, Gated, enqueue, stop

CAPACITY = 2


@pytest.fixture
def bench(sqlite_client: Client) -> Iterator[Bench]:
    bench = Bench(sqlite_client, Gated(), capacity=CAPACITY, reserved_slots=1)
    lane = InteractiveConsumer(
        sqlite_client.broker,
        (None, "model"),
        bench.service.in_flight,
        lambda job_ids: bench.service.take(job_ids, interactive=True),
        bench.fatal.append,
    )
    lane.start()
    yield bench
    bench.runner.gate.set()  # type: ignore[attr-defined]
    stop(bench)
    lane.close()
    assert not bench.fatal


def state(bench: Bench, job_id: str) -> JobState:
    return bench.client.get(job_id).state


def test_interactive_jobs_are_claimed_while_batches_fill_the_worker_and_then_come_first(bench: Bench) -> None:
    client, claimed, claim = bench.client, list[str](), bench.claims.claim_within

    def noted(job_ids: Sequence[str], *room: int) -> tuple[list[Claim], dict[str, int]]:
        claimed.extend(job_ids)
        return claim(job_ids, *room)

    bench.claims.claim_within = noted  # type: ignore[method-assign]
    rows = enqueue(client, 2 * CAPACITY, max_tokens=3)
    bench.run(rows)
    wait_until(lambda: [state(bench, row) for row in rows].count(JobState.RUNNING) == CAPACITY)
    assert bench.service.in_flight.room == 0
    first = client.enqueue("prompt", interactive=True, max_tokens=3)
    wait_until(lambda: state(bench, first) is JobState.RUNNING)
    second = client.enqueue("prompt", interactive=True, max_tokens=3)
    wait_until(lambda: bench.service.in_flight._urgent)
    assert (state(bench, second), client.get(second).priority) == (JobState.QUEUED, INTERACTIVE)
    assert client.broker.heads(None)[INTERACTIVE] == [second]
    bench.runner.gate.set()  # type: ignore[attr-defined]
    client.wait([*rows, first, second], timeout=240)
    assert claimed.index(second) == CAPACITY + 1
    in_flight = bench.service.in_flight
    wait_until(lambda: in_flight.idle)
    assert (in_flight.room_for(False), in_flight.room_for(True)) == (CAPACITY, CAPACITY + 1)


def test_what_is_no_job_is_removed_and_what_got_lost_is_sent_again(
    bench: Bench, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = bench.client
    bench.service.in_flight.pause()
    job_id = client.enqueue("prompt", interactive=True, model="model", max_tokens=3)
    name = lane_name("model")
    with redis.Redis.from_url(redis_url) as broker:
        broker.delete(name)
        broker.lpush(name, b"\xff", "no id", "0" * 32, "F" * 32)
        (lost,) = Sweep(client.database).unanswered("model", timedelta(seconds=-1), 10)
        client.broker.announce([*lost.job_ids, job_id], lost.model, lost.priority)
        bench.service.in_flight.resume()
        bench.runner.gate.set()  # type: ignore[attr-defined]
        client.wait(job_id, timeout=240)
        wait_until(lambda: not broker.exists(name))
    assert "entries of nightmill:interactive:model that are not job ids were removed" in caplog.text
    assert client.get(job_id).attempt == 1


def test_a_priority_of_ones_own_is_kept(sqlite_client: Client) -> None:
    job_id = sqlite_client.enqueue("prompt", interactive=True, priority=3)
    assert sqlite_client.get(job_id).priority == 3
    with pytest.raises(InvalidParameterError, match="priority"):
        sqlite_client.enqueue("prompt", priority=INTERACTIVE)
