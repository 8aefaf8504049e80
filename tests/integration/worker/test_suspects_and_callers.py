"""After a worker's death: interactive jobs wait for one turn of suspects at a time, and run beside none."""

import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claim, Claims, Outcome
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.service.in_flight import JobKey
from nightmill.worker.service.interactive import InteractiveConsumer
from nightmill.worker.service.suspects import SuspectsTurn
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.servers import ENDLESS_TOKENS, wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, Gated, enqueue, stop, these
from tests.unit.worker.interrupted import LONG, make_suspects, undisturbed

CAPACITY = 4


class Slow(Gated):
    """Draws some tokens of a text at once; then it takes 0.2 s for each step, until the gate is open."""

    def launch(self, batch: StepBatch) -> None:
        if len(self.batches) >= 40:
            self.gate.wait(0.2)
        ScriptedRunner.launch(self, batch)


class Watched(Bench):
    """Notes what runs beside what, and which jobs have ended, in order."""

    def __init__(self, client: Client, runner: Gated) -> None:
        super().__init__(client, runner, capacity=CAPACITY, reserved_slots=1)
        self.gate = runner.gate
        self.together: list[set[str]] = []
        self.ended: list[str] = []
        self._begin, self._finish = self.service.begin, self.claims.finish
        self.service.begin = self._note_begin  # type: ignore[method-assign]
        self.service._writer._write = self._note_end
        self.lane = InteractiveConsumer(
            client.broker,
            (None, "model"),
            self.service.in_flight,
            lambda job_ids: self.service.take(job_ids, interactive=True),
            self.fatal.append,
        )
        self.lane.start()

    def turn(self, *, turn_seconds: float, recess_seconds: float) -> threading.Thread:
        """Begin to look for suspects."""
        suspects = SuspectsTurn(
            self.claims, self.service, (None, "model"), 0.0, self.announce,
            turn_seconds=turn_seconds, recess_seconds=recess_seconds,
        )  # fmt: skip
        thread = threading.Thread(target=suspects.look, daemon=True)
        thread.start()
        return thread

    def _note_begin(self, claims: Sequence[Claim]) -> list[JobKey]:
        self.together.append(set(dict(self.service.in_flight.keys())))
        return self._begin(claims)

    def _note_end(self, outcomes: Sequence[Outcome]) -> int:
        self.ended += [outcome.job_id for outcome in outcomes]
        return self._finish(outcomes)


@pytest.fixture
def bench(sqlite_client: Client, request: pytest.FixtureRequest) -> Iterator[Watched]:
    bench = Watched(sqlite_client, getattr(request, "param", Gated)())
    yield bench
    bench.gate.set()
    stop(bench)
    bench.lane.close()
    assert not bench.fatal


def long_suspects(client: Client, count: int) -> list[str]:
    """Suspects with the seeds 0, 1, ..., whose texts are long."""
    ids = [client.enqueue("prompt", seed=seed, **LONG) for seed in range(count)]
    dead = Claims(client.database, "d" * 32)
    dead.give_up([(one.job_id, one.attempt) for one in dead.claim(ids)], "it died")
    return ids


def state(bench: Bench, job_id: str) -> JobState:
    return bench.client.get(job_id).state


def test_interactive_jobs_are_admitted_while_a_worker_drains(bench: Watched) -> None:
    rows = enqueue(bench.client, 3, max_tokens=3)
    running = bench.run(rows)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    suspects = make_suspects(bench.client, 2)
    turn = bench.turn(turn_seconds=60.0, recess_seconds=0.05)
    wait_until(lambda: bench.service.in_flight.room == 0)
    job_id = bench.client.enqueue("prompt", interactive=True, max_tokens=3)
    wait_until(lambda: state(bench, job_id) is JobState.RUNNING)
    assert {state(bench, one) for one in suspects} == {JobState.QUEUED}
    bench.gate.set()
    for thread in (running, turn):
        thread.join(120)
    bench.client.wait([*rows, *suspects, job_id], timeout=240)
    assert all(not together & set(suspects) or together <= set(suspects) for together in bench.together)


@pytest.mark.parametrize("bench", [Slow], indirect=True)
def test_long_suspects_are_interrupted_for_an_interactive_job_and_go_on_from_their_tokens(
    bench: Watched,
) -> None:
    suspects = long_suspects(bench.client, 4)
    turn = bench.turn(turn_seconds=0.0, recess_seconds=30.0)
    wait_until(lambda: len(bench.runner.batches) >= 40)
    job_id = bench.client.enqueue("prompt", interactive=True, max_tokens=3)
    bench.client.wait(job_id, timeout=240)
    bench.gate.set()
    bench.client.wait(suspects, timeout=240)
    turn.join(120)
    assert bench.ended[0] == job_id
    for seed, one in enumerate(map(bench.client.get, suspects)):
        assert (one.text, one.failures, one.errors) == (undisturbed(seed)[1], 0, [])
    stats = bench.engine.stats
    assert stats.resumed_tokens > 0
    # The job of 3 tokens may have ended with fewer.
    assert 4 * 120 < stats.generated_tokens <= 4 * 120 + 3  # nothing was drawn twice
    apart = [set(suspects[:2]), set(suspects[2:]), {job_id}]
    assert all(together in apart for together in bench.together)


@pytest.mark.parametrize("bench", [Slow], indirect=True)
def test_a_long_interactive_job_is_set_aside_for_a_turn_and_goes_on_from_its_tokens(bench: Watched) -> None:
    job_id = bench.client.enqueue("prompt", interactive=True, seed=7, **LONG)
    wait_until(lambda: len(bench.runner.batches) >= 40)
    suspects = make_suspects(bench.client, 2)
    turn = bench.turn(turn_seconds=60.0, recess_seconds=0.0)
    bench.client.wait(suspects, timeout=240)
    bench.gate.set()
    bench.client.wait(job_id, timeout=240)
    turn.join(120)
    assert bench.ended == [*suspects, job_id]
    job = bench.client.get(job_id)
    assert (job.text, job.attempt, job.failures) == (undisturbed(7)[1], 2, 0)
    assert bench.engine.stats.resumed_tokens >= 39


def test_an_engine_that_does_not_answer_ends_the_worker_and_loses_no_job(
    bench: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may drop its jobs at any time afterwards, and would never complete them."""
    suspects = make_suspects(bench.client, 4)
    monkeypatch.setattr(bench.service.engine, "abandon", lambda patience=None: None)
    turn = bench.turn(turn_seconds=0.0, recess_seconds=30.0)
    wait_until(bench.service.in_flight.keys)
    bench.client.enqueue("prompt", interactive=True, max_tokens=3)
    wait_until(lambda: bench.fatal)
    turn.join(120)
    assert bench.fatal == ["the engine did not answer when its jobs were to be set aside"]
    assert {state(bench, one) for one in suspects} == {JobState.QUEUED}
    bench.fatal.clear()


def rescued(job: Job) -> bool:
    return job.attempt > 1 or (job.attempt == 1 and job.state is JobState.QUEUED)


@on_sqlite
def test_an_interactive_job_is_answered_before_the_rows_of_a_killed_worker(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    with start_worker("a", "--max-sequences", "24") as doomed:
        rows = list(
            jobs_client.enqueue_many(
                ["Once upon a time"] * 24, n=2, max_tokens=ENDLESS_TOKENS, ignore_eos=True
            )
        )
        wait_until(lambda: jobs_client.stats()["state"].get("running"))
        doomed.send_signal(signal.SIGKILL)
        doomed.wait(120)
    with start_worker("b", "--max-sequences", "24", drain_seconds=0.3):
        # Rescued: it drains what it has begun, or runs the first group already.
        wait_until(lambda: any(rescued(job) for job in jobs_client.store.find(these(rows))))
        caller = jobs_client.enqueue("Once", interactive=True, max_tokens=4)
        jobs_client.wait(caller, timeout=120)
        jobs = jobs_client.store.find(these(rows))
        suspects = [job for job in jobs if job.attempt > 0]
        assert any(not job.state.final for job in suspects)
        assert {job.failures for job in jobs} == {0}
