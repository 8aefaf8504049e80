"""What a worker does for all, on a real database and broker, with a clock of ours."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import pytest
import redis

from nightmill.jobs.base.contract import JobState, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.silence import Silence
from nightmill.jobs.errors import BrokerUnreachableError
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.housekeeper import DEAF_SECONDS, Housekeeper, TopUpRule
from tests.support.nvml import FakeNvml
from tests.support.servers import Clock, wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, enqueue, these

MODEL = "model"


def keep_house(bench: Bench, settings: Settings) -> Housekeeper:
    heart = Heart(bench.claims, settings.stale_seconds)
    return Housekeeper(bench.service, bench.claims, heart, bench.client.broker, settings, MODEL)


@pytest.fixture
def bench(build: Callable[..., Bench]) -> Bench:
    return build(ScriptedRunner())


def lapse(housekeeper: Housekeeper, clock: Clock, seconds: float) -> None:
    """Let time go by, with the worker at work."""
    for _ in range(int(seconds / 5)):
        clock.advance(5)
        housekeeper.beat()
        housekeeper.sweep()


def dead_worker(bench: Bench) -> Claims:
    dead = Claims(bench.client.database, "d" * 32)
    dead.register("host", 2, MODEL, None)
    dead.beat(WorkerState.READY)
    return dead


def test_jobs_of_a_silent_worker_are_taken_but_not_right_after_a_pause(
    bench: Bench, clock: Clock, sqlite_settings: Settings
) -> None:
    housekeeper = keep_house(bench, sqlite_settings)
    lapse(housekeeper, clock, 60)
    ids = enqueue(bench.client, 3)
    other, own = dead_worker(bench), bench.claims
    assert len(other.claim(ids[:2])) == 2 and len(own.claim(ids[2:])) == 1
    clock.advance(3600)  # everybody slept
    for _ in range(2):
        housekeeper.sweep()  # whichever of the two comes first
        housekeeper.beat()
    assert {job.state for job in bench.client.store.find(these(ids[:2]))} == {JobState.RUNNING}
    lapse(housekeeper, clock, 30)  # the other does not wake
    jobs = bench.client.store.find(these(ids[:2]))
    assert {(job.state, job.worker) for job in jobs} == {(JobState.QUEUED, None)}


def test_jobs_whose_message_a_dead_worker_had_are_sent_again_though_others_wait(
    bench: Bench, clock: Clock, sqlite_settings: Settings
) -> None:
    """The queue is not empty, as in a long night; nothing waits that was sent before the jobs at its head."""
    housekeeper = keep_house(bench, sqlite_settings)
    client, broker = bench.client, bench.client.broker
    lost = client.enqueue("prompt", priority=3)
    with redis.Redis.from_url(str(sqlite_settings.broker_url)) as connection:
        (key,) = connection.keys("nightmill*")
        assert connection.rpop(key)  # taken by a worker, which was killed
        clock.advance(30)
        waiting = enqueue(client, 3, priority=3)
        urgent = enqueue(client, 3, priority=9)
        clock.advance(20)
        housekeeper.sweep()
        assert broker.heads(None) == {3: waiting, 9: urgent}
        clock.advance(3600)
        housekeeper.sweep()
        assert connection.llen(key) == 1  # it was sent only 30 s before those at the head: who knows
        connection.rpop(key)
        later = enqueue(client, 3, priority=3)
        for _ in range(2):
            housekeeper.sweep()
            assert broker.heads(None) == {3: later, 9: urgent}
            assert connection.llen(key) == 2  # one message for what was lost, and only one
            clock.advance(3600)
        connection.rpop(key)
        assert broker.heads(None)[3] == [lost, *waiting]


def test_an_idle_worker_is_deaf_once_messages_have_waited_for_long_before_its_eyes(
    bench: Bench, sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    housekeeper = keep_house(bench, sqlite_settings)
    hand = Clock()
    silence = Silence(DEAF_SECONDS, 10.0, lambda: hand.time.timestamp())
    housekeeper._hearing = {None: silence}
    there: dict[int, list[str]] | BrokerUnreachableError = {}

    def heads(model: str | None) -> dict[int, list[str]]:
        if isinstance(there, BrokerUnreachableError):
            raise there
        return there

    def sweeps(seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            hand.advance(5)
            with suppress(BrokerUnreachableError):
                housekeeper.sweep()

    monkeypatch.setattr(bench.client.broker, "heads", heads)
    sweeps(2 * DEAF_SECONDS)  # nothing waits
    waiting = {5: ["0" * 32]}
    there = BrokerUnreachableError()
    sweeps(2 * DEAF_SECONDS)  # the broker is away
    there = waiting
    sweeps(DEAF_SECONDS - 10)  # Celery takes up to half a minute to come back to it
    bench.service.last_shard_at += 1.0  # a shard came
    sweeps(DEAF_SECONDS)
    hand.advance(3600)  # the machine slept
    assert bench.fatal == []
    sweeps(10)
    assert len(bench.fatal) == 1 and "its broker connection is dead" in bench.fatal[0]


def test_a_heartbeat_says_what_the_engine_has_done_and_how_its_gpu_is(
    bench: Bench, clock: Clock, sqlite_settings: Settings
) -> None:
    heart, probe = Heart(bench.claims, 30.0), GpuProbe(0, lambda name: FakeNvml())
    broker = bench.client.broker
    housekeeper = Housekeeper(bench.service, bench.claims, heart, broker, sqlite_settings, MODEL, probe)
    ids = enqueue(bench.client, 3, max_tokens=5)
    bench.service.run_shard(ids)
    wait_until(lambda: bench.service.engine.stats.generated_tokens >= 3)
    probe.refresh()
    housekeeper.beat()
    (worker,) = bench.client.workers()
    stats = bench.service.engine.stats
    assert worker.stats is not None
    assert worker.stats.items() >= asdict(stats).items()
    assert worker.stats["tokens_per_second"] > 0 and worker.stats["in_flight"] in range(4)
    assert (worker.stats["temperature"], worker.stats["power"]) == (61, 312.5)


def test_queues_are_filled_up_soon_after_a_claim_and_not_before(
    bench: Bench, clock: Clock, sqlite_settings: Settings
) -> None:
    housekeeper = keep_house(bench, sqlite_settings)
    housekeeper.beat()
    bench.client.submit_batch([{"prompt": str(row), "max_tokens": 1} for row in range(1300)], name="large")
    sent = bench.client.broker.queue_length
    assert sent(None) == 16  # a quarter of the queue at once
    housekeeper._has_beaten.set()
    housekeeper._top_up_after_claims()
    assert sent(None) == 16
    bench.run([job.id for job in bench.client.list_jobs(batch="large", limit=4)])
    housekeeper._top_up_after_claims()
    assert sent(None) == 16 + 276 // 64 + 1
    housekeeper._top_up_after_claims()
    assert sent(None) == 21


def test_flows_are_looked_at_once_an_eighth_of_a_queue_or_two_seconds_are_gone() -> None:
    """A thousand rows a second for ten seconds, then ten rows a second; it is asked twice a second."""
    rule, looks = TopUpRule(shard_size=64), list[float]()
    for tick in range(21):
        if rule.due(500 * tick, tick / 2):
            looks.append(tick / 2)
    assert looks == [float(second) for second in range(11)]
    assert [tick / 2 for tick in range(21, 41) if rule.due(10_000 + 5 * (tick - 20), tick / 2)] == [
        12.0, 14.0, 16.0, 18.0, 20.0,
    ]  # fmt: skip


def test_of_small_queues_flows_are_looked_at_whenever_rows_end() -> None:
    rule = TopUpRule(shard_size=1)
    assert [rule.due(8 * look, look / 2) for look in range(4)] == [True] * 4
