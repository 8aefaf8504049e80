"""Workers and suspects: groups run with nothing beside them, until the guilty job is alone."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim, Claims
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.suspects import SuspectsTurn, _gained
from tests.support.servers import wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, Gated, enqueue
from tests.unit.worker.interrupted import make_suspects

POISON = 666  # the seed of a job that breaks the engine
FOREVER = 1e9


class Poisoned(ScriptedRunner):
    """Breaks on a guilty job; notes which jobs run beside one another."""

    def launch(self, batch: StepBatch) -> None:
        if any(admission.seed == POISON for admission in batch.admissions):
            raise RunnerError("the arithmetic gave out")
        super().launch(batch)


def test_only_the_job_that_breaks_every_engine_fails(build: Callable[..., Bench]) -> None:
    starts = 0

    def start() -> Bench:
        nonlocal starts
        starts += 1
        return build(Poisoned(slots=64, kv_pages=512), capacity=64, name=f"{starts:x}")

    bench = start()
    ids = enqueue(bench.client, 63, max_tokens=3)
    guilty = bench.client.enqueue("prompt", seed=POISON, max_tokens=3)
    shard = sorted([*ids[:20], guilty, *ids[20:]])
    while True:
        bench.suspects.look()
        if not bench.fatal:
            bench.service.run_shard(shard)
        if not bench.fatal:
            break
        bench = start()
    assert bench.client.stats()["state"] == {"succeeded": 63, "failed": 1}
    job = bench.client.get(guilty)
    assert (job.failures, job.error) == (
        3,
        "all 3 attempts failed; the last: the engine failed: the arithmetic gave out",
    )
    assert {(job.failures, len(job.errors)) for job in map(bench.client.get, ids)} == {(0, 0)}
    assert starts - 1 <= 6 + 3  # halves until it is alone, and its attempts


def test_a_group_runs_with_nothing_beside_it(build: Callable[..., Bench]) -> None:
    bench = build(Gated(), capacity=8)
    suspects, others = make_suspects(bench.client, 4), enqueue(bench.client, 6, max_tokens=3)
    seen: list[set[str]] = []
    begin = bench.service.begin

    def noted(claims: Sequence[object]) -> list[tuple[str, int]]:
        in_flight = bench.service.in_flight.keys()
        seen.append({job_id for job_id, _ in in_flight})
        return begin(claims)  # type: ignore[arg-type]

    bench.service.begin = noted  # type: ignore[method-assign]
    turn = threading.Thread(target=bench.suspects.look, daemon=True)
    turn.start()
    wait_until(lambda: seen)
    shard = bench.run(others)
    bench.runner.gate.set()  # type: ignore[attr-defined]
    turn.join(120)
    shard.join(120)
    assert seen[:2] == [set(suspects[:2]), set(suspects[2:])]
    assert set().union(*seen[2:]) == set(others)
    assert bench.client.stats()["state"] == {"succeeded": 10}


def test_a_busy_worker_leaves_suspects_to_others_at_first(build: Callable[..., Bench]) -> None:
    bench = build(Gated(), capacity=8)
    running = bench.run(enqueue(bench.client, 3, max_tokens=3))
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    suspects = make_suspects(bench.client, 2)
    patient = SuspectsTurn(bench.claims, bench.service, (None,), FOREVER, bench.announce)
    patient.look()
    assert bench.service.in_flight.room == 5
    assert {bench.client.get(job_id).state for job_id in suspects} == {JobState.QUEUED}
    bench.runner.gate.set()  # type: ignore[attr-defined]
    running.join(120)
    patient.look()  # idle now
    assert {bench.client.get(job_id).state for job_id in suspects} == {JobState.SUCCEEDED}


def test_a_worker_that_waits_for_its_turn_goes_on_once_another_has_the_suspects(
    build: Callable[..., Bench],
) -> None:
    bench = build(Gated(), capacity=8)
    running = bench.run(enqueue(bench.client, 3, max_tokens=3))
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    make_suspects(bench.client, 2)
    turn = threading.Thread(target=bench.suspects.look, daemon=True)
    turn.start()
    wait_until(lambda: bench.service.in_flight.room == 0)
    more = enqueue(bench.client, 2, max_tokens=3)
    waiting = bench.run(more)
    other = Claims(bench.client.database, "e" * 32)
    while other.claim_suspects((None,), 10):
        pass
    turn.join(120)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 5)
    bench.runner.gate.set()  # type: ignore[attr-defined]
    for thread in (running, waiting):
        thread.join(120)
    assert {bench.client.get(job_id).state for job_id in more} == {JobState.SUCCEEDED}


def test_a_stopping_worker_hands_suspects_back_as_suspects(build: Callable[..., Bench]) -> None:
    bench = build(Gated(), capacity=8)
    ids = make_suspects(bench.client, 2)
    turn = threading.Thread(target=bench.suspects.look, daemon=True)
    turn.start()
    wait_until(lambda: bench.service.in_flight.keys())
    bench.service.drain_seconds = 0.0
    draining = threading.Thread(target=bench.service.drain, daemon=True)
    draining.start()
    wait_until(lambda: bench.service.draining)
    bench.runner.gate.set()  # type: ignore[attr-defined]
    draining.join(120)
    turn.join(120)
    assert not turn.is_alive()
    left = [job_id for job_id in ids if bench.client.get(job_id).state is JobState.QUEUED]
    other = Claims(bench.client.database, "e" * 32)
    assert left and other.claim(left) == []
    assert other.claim_suspects((None,), 10) != []


@pytest.mark.parametrize(
    ("kept", "params", "gained"),
    [
        ({}, {}, True),  # it has ended
        ({("j", 2): 0}, {}, False),
        ({("j", 2): 5}, {}, False),  # as many as it came with
        ({("j", 2): 6}, {}, True),
        ({("j", 2): 6}, {"logprobs": 0}, False),  # they are drawn anew
        ({("j", 2): 6}, {"score": ("a", "b")}, False),
    ],
)
def test_a_turn_has_gained_what_the_next_attempt_goes_on_from(
    kept: dict[tuple[str, int], int], params: dict[str, Any], gained: bool
) -> None:
    claim = Claim(
        "j", 2, "p", None, GenerationParams(**params), 0, None, saved=SavedTokens("j", 1, "", (1,) * 5)
    )
    assert _gained([claim], kept) is gained


class Stuck:
    """A service whose jobs never end and never gain a token, while an interactive job waits."""

    def __init__(self) -> None:
        self.in_flight = InFlight(4)
        self.turns: list[float] = []
        self.begun = 0.0

    def begin(self, claims: Sequence[Claim]) -> list[tuple[str, int]]:
        self.in_flight.wait_for_room(0.0, urgent=True)
        self.begun = time.monotonic()
        return [(claim.job_id, claim.attempt) for claim in claims]

    def set_aside(self) -> dict[tuple[str, int], int]:
        keys = self.in_flight.keys()
        if keys:  # there are none in a recess
            self.turns.append(time.monotonic() - self.begun)
        self.in_flight.remove(keys)
        return dict.fromkeys(keys, 0)


class OneGroup:
    """Claims that give the same suspect so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def suspects_wait(self, models: object) -> bool:
        return self.left > 0

    def claim_suspects(self, models: object, limit: int) -> list[Claim]:
        self.left -= 1
        return [Claim("j", 9 - self.left, "p", None, GenerationParams(), 0, None)]


def test_turns_that_gain_nothing_grow_until_they_do() -> None:
    service = Stuck()
    claims: Any = OneGroup(4)
    SuspectsTurn(claims, service, (None,), 0.0, lambda: None, turn_seconds=0.25, recess_seconds=0.0).look()
    least = (0.25, 0.5, 1.0, 2.0)
    assert all(turn >= seconds for turn, seconds in zip(service.turns, least, strict=True))
