"""Workers that sleep: their hours by a stepped clock, pauses by hand, and a row that stays the same."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.printing import describe_status
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.app import EngineStep
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.resting import RestRule
from nightmill.worker.service.sleeping import Sleeper
from tests.support.servers import Clock


def registered(client: Client, letter: str, model: str = "model") -> Claims:
    claims = Claims(client.database, letter * 32)
    claims.register("host", 1, model, None)
    claims.beat(WorkerState.READY)
    return claims


def test_who_is_paused_sleeps_until_resumed_and_others_do_not_notice(client: Client) -> None:
    one, other = registered(client, "a"), registered(client, "b", "other")
    rules = [RestRule(claims, client.settings, (None, "model")) for claims in (one, other)]
    assert [rule.reason(0.0) for rule in rules] == [None, None]
    assert [worker.id for worker in client.worker_store.pause(["aaa"])] == [one.worker_id]
    assert [rule.reason(0.0) for rule in rules] == ["paused, until it is resumed", None]
    assert client.worker_store.pause(["aaa"]) == []  # it is already
    assert [worker.id for worker in client.worker_store.pause()] == [other.worker_id]
    assert {worker.paused for worker in client.workers()} == {True}
    assert len(client.worker_store.pause(paused=False)) == 2
    assert [rule.reason(0.0) for rule in rules] == [None, None]
    for bad, said in {"c": "is not the id of a live worker; alive are ", "": "is not the id"}.items():
        with pytest.raises(InvalidRequestError, match=said):
            client.worker_store.pause([bad])


def test_models_on_one_gpu_are_paused_one_by_one_or_all_by_what_they_share(client: Client) -> None:
    group = "7" * 32
    for letter in "abc":
        claims = registered(client, letter, letter)
        shared = None if letter == "c" else group
        claims.register_models([letter], swap_for_interactive=False, together=shared)
    store = client.worker_store
    assert [worker.model for worker in store.pause(["a"])] == ["a"]
    assert [worker.model for worker in store.pause(["777", "b"])] == ["b"]  # the one that was not yet
    assert {worker.model for worker in store.pause(["7"], paused=False)} == {"a", "b"}
    registered(client, "7")
    with pytest.raises(InvalidRequestError, match="begins the ids of 2 live workers"):
        store.pause(["7"])
    assert {worker.model for worker in store.pause()} == {"a", "b", "c", "model"}


def test_a_sleeping_worker_is_alive_but_serves_nobody_and_wakes_with_its_row(client: Client) -> None:
    claims = registered(client, "a")
    claims.beat(WorkerState.SLEEPING, "idle, until there are jobs")
    assert client.worker_store.serving() == []
    assert [worker.state for worker in client.worker_store.serving("model", sleeping=True)] == [
        WorkerState.SLEEPING
    ]
    claims.register("host", 2, "model", None)
    (worker,) = client.workers()
    assert (worker.state, worker.pid, worker.detail) == (WorkerState.STARTING, 2, None)


def test_hours_follow_the_databases_clock_and_deadlines_are_kept_meanwhile(
    client: Client, clock: Clock
) -> None:
    claims = registered(client, "a")
    settings = client.settings.model_copy(update={"hours": "22:00-06:00/UTC"})
    rule = RestRule(claims, settings, (None, "model"))
    sleeper = Sleeper(rule, claims, Heart(claims, 30.0), Sweep(client.database), 5.0)
    clock.time = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
    late = client.enqueue("too late", deadline=timedelta(hours=1))
    assert not sleeper.look(0.0)
    (worker,) = client.workers()
    assert (worker.state, worker.detail) == (WorkerState.SLEEPING, "until 22:00 (22:00-06:00/UTC)")
    assert worker.wakes_at(clock()) == datetime(2026, 1, 2, 22, 0, tzinfo=UTC)
    clock.advance(hours=2)
    assert not sleeper.look(1.0)  # not time to beat
    assert client.get(late).finished_at is None
    assert not sleeper.look(6.0)
    assert client.get(late).stop_reason == "deadline"
    clock.advance(hours=8, minutes=1)
    assert sleeper.look(7.0)


def test_who_sleeps_hands_back_what_it_could_not_when_it_fell_asleep(client: Client) -> None:
    """Its heartbeat goes on, so nobody else would take the job from it."""
    claims = registered(client, "a")
    job_id = client.enqueue("Once")
    (claim,) = claims.claim([job_id])
    client.worker_store.pause()
    rule = RestRule(claims, client.settings, (None, "model"))
    sleeper = Sleeper(rule, claims, Heart(claims, 30.0), Sweep(client.database), 5.0)
    assert client.get(job_id).state is JobState.RUNNING
    assert not sleeper.look(0.0)
    job = client.get(job_id)
    assert (job.state, job.attempt, claims.running()) == (JobState.QUEUED, claim.attempt, {})
    client.cancel(job_id)
    assert not sleeper.look(6.0)


def test_who_wakes_at_once_hands_that_back_before_and_is_shown_as_sleeping(client: Client) -> None:
    """Its database was away when its turn ended, so its row says that it drains; it wakes with that row."""
    claims = registered(client, "a")
    job_id = client.enqueue("Once")
    assert claims.claim([job_id])
    claims.beat(WorkerState.DRAINING)
    rule = RestRule(claims, client.settings, (None, "model"))
    sleeper = Sleeper(rule, claims, Heart(claims, 30.0), Sweep(client.database), 5.0)
    assert sleeper.look(0.0), "there is no reason to sleep"
    assert (client.get(job_id).state, claims.running()) == (JobState.QUEUED, {})
    claims.register("host", 2, "model", None)
    assert [(worker.id, worker.pid) for worker in client.workers()] == [(claims.worker_id, 2)]


def step_of(client: Client, claims: Claims, **options: Any) -> EngineStep:
    """A worker's step that has nothing but its row."""
    step: Any = EngineStep(SimpleNamespace(), **options)
    step.claims, step.database = claims, client.database
    step.service = step.courier = step.housekeeper = step.interactive = step.broker = MagicMock()
    return cast(EngineStep, step)


def test_a_worker_falls_asleep_with_empty_hands(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that an outage has kept from being written are computed again, by others, too."""
    claims = registered(client, "a")
    job_id = client.enqueue("Once")
    assert claims.claim([job_id])
    step = step_of(client, claims)
    step.rest_reason = "bytes is next"
    held = []
    beat = claims.beat

    def seen(state: WorkerState, *said: Any) -> bool:
        held.append((state, claims.running()))
        return beat(state, *said)

    monkeypatch.setattr(claims, "beat", seen)
    monkeypatch.setattr(client.database, "close", lambda: None)
    step.stop(None)
    assert held == [(WorkerState.SLEEPING, {})]
    assert client.get(job_id).state is JobState.QUEUED
    (worker,) = client.workers()
    assert (worker.state, worker.detail) == (WorkerState.SLEEPING, "bytes is next")


def test_a_worker_that_is_ended_while_it_loads_is_forgotten_unless_it_has_slept(client: Client) -> None:
    """Callers were told that it would serve its models in turn: they are not refused meanwhile."""
    for letter in "ab":
        claims = registered(client, letter, f"first-{letter}")
        claims.register_models([f"first-{letter}", f"second-{letter}"], swap_for_interactive=False)
        if letter == "b":
            claims.beat(WorkerState.SLEEPING, "between two models")
            claims = registered(client, letter, "second-b")
        step_of(client, claims)._not_loaded(KeyboardInterrupt())
    assert client.worker_store.models() == ["first-b", "second-b"]
    client.enqueue("in turn", model="second-b")
    assert [worker.state for worker in client.workers()] == [WorkerState.STOPPED]


def test_an_idle_worker_wakes_for_jobs_that_are_due_and_its_own(client: Client, clock: Clock) -> None:
    claims = registered(client, "a")
    settings = client.settings.model_copy(update={"idle_seconds": 60.0})
    rule = RestRule(claims, settings, (None, "model"))
    assert rule.reason(59.0) is None
    assert rule.reason(60.0) == "idle, until there are jobs"
    registered(client, "b", "other")
    client.enqueue("for another", model="other")
    client.enqueue("later", scheduled_at=timedelta(hours=1))
    assert rule.reason(60.0) == "idle, until there are jobs"
    clock.advance(hours=1, seconds=1)
    assert rule.reason(60.0) is None


def test_forecasts_count_the_hours_of_those_who_serve(client: Client, clock: Clock) -> None:
    clock.time = datetime(2026, 1, 2, 5, 30, tzinfo=UTC)
    claims = registered(client, "a")
    told = {"hours": "22:00-06:00/UTC"}
    claims.beat(WorkerState.READY, None, told)
    rows = [{"prompt": str(number)} for number in range(120)]
    batch = client.submit_batch(rows, name="night", model="model")
    for claim in claims.claim([job.id for job in client.list_jobs(batch="night", limit=120)][:2]):
        clock.advance(30)
        claims.beat(WorkerState.READY, None, told)
        claims.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, "t", 1, 1)])
    status = batch.status()  # a row each half minute: 59 minutes more, of which this night has 29
    assert status.estimated_end == datetime(2026, 1, 2, 22, 30, tzinfo=UTC) and status.wakes_at is None
    other = registered(client, "b")  # which serves at any time
    assert batch.status().estimated_end == datetime(2026, 1, 2, 6, 30, tzinfo=UTC)
    other.sign_off()
    clock.time = datetime(2026, 1, 2, 7, 0, tzinfo=UTC)
    claims.beat(WorkerState.SLEEPING, "until 22:00 (22:00-06:00/UTC)", told)
    status = batch.status()
    assert (status.estimated_end, status.wakes_at) == (None, datetime(2026, 1, 2, 22, 0, tzinfo=UTC))
    assert "when the hours of its workers begin" in describe_status(status)
    client.worker_store.pause()
    assert batch.status().wakes_at is None  # nobody knows
