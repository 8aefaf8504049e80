"""The service in one process, on an engine (in a thread) whose runner does as the test says."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from jobs.claims import Claim, Claims
from jobs.client import Client
from jobs.contract import JobState, StopReason
from jobs.errors import ChatTemplateError, DatabaseUnreachableError, RunnerError
from jobs.store import Selection
from jobs.sweep import Sweep
from tests.servers import Clock, wait_until
from tests.unit.engine.scripted import EOS, PieceStream, ScriptedRunner, expected, make_request
from tests.unit.worker.threads import engine_in_thread
from worker.engine.engine import Engine
from worker.runners.base import StepBatch
from worker.service import Service

PROMPT = (1, 2, 3)


class Faulty(ScriptedRunner):
    """Raises at a launch once it is told to."""

    broken = False

    def launch(self, batch: StepBatch) -> None:
        if self.broken:
            raise RunnerError("the arithmetic gave out")
        super().launch(batch)


class Gated(ScriptedRunner):
    """Launches only while its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()

    def launch(self, batch: StepBatch) -> None:
        assert self.gate.wait(60)
        super().launch(batch)


class Pausing(Gated):
    """Stops before its launch number `pause_at` until the gate is open."""

    pause_at = 40

    def launch(self, batch: StepBatch) -> None:
        if len(self.batches) >= self.pause_at:
            super().launch(batch)
        else:
            ScriptedRunner.launch(self, batch)


class Bench:
    """A service on a client's database, and what became of it."""

    def __init__(
        self,
        client: Client,
        runner: ScriptedRunner,
        capacity: int = 8,
        name: str = "a",
        model_digest: str = "digest",
    ) -> None:
        self.client = client
        self.runner = runner
        self.claims = Claims(client.database, name * 32)
        self.claims.register("host", 1, "model", None)
        self.fatal: list[str] = []
        self.engine = Engine(
            runner,
            text_stream=PieceStream,
            eos_ids=frozenset({EOS}),
            context_length=200,
            max_sequences=runner.slots,
            token_budget=64,
        )
        self.service = Service(
            self.claims,
            engine_in_thread(lambda: self.engine),
            self.tokenize,
            model_digest=model_digest,
            capacity=capacity,
            drain_seconds=5.0,
            on_fatal=self.fatal.append,
        )

    @staticmethod
    def tokenize(claim: Claim) -> tuple[int, ...]:
        if claim.prompt == "unspeakable":
            raise ChatTemplateError("the template refuses")
        return PROMPT

    def run(self, job_ids: list[str]) -> threading.Thread:
        thread = threading.Thread(target=self.service.run_shard, args=(job_ids,), daemon=True)
        thread.start()
        return thread


@pytest.fixture
def build(sqlite_client: Client) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(runner: ScriptedRunner, **options: Any) -> Bench:
        made.append(Bench(sqlite_client, runner, **options))
        return made[-1]

    yield make
    for bench in made:
        if isinstance(bench.runner, Gated):
            bench.runner.gate.set()
        stop(bench)


def stop(bench: Bench) -> None:
    bench.service.drain_seconds = 0.0
    bench.service.drain()
    bench.service.close()


def enqueue(client: Client, count: int, **settings: Any) -> list[str]:
    return list(client.enqueue_many(["prompt"] * count, **settings))


def test_shard_returns_when_every_job_of_it_is_written(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    ids = enqueue(bench.client, 20, max_tokens=5)
    bench.service.run_shard(ids)
    assert {job.state for job in bench.client.results(ids, wait=False)} == {JobState.SUCCEEDED}
    assert len(list(bench.client.results(ids, wait=False))) == 20
    assert bench.service.in_flight.keys() == []
    bench.engine.check_integrity()
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_no_more_is_claimed_than_there_is_room_for(build: Callable[..., Bench]) -> None:
    runner = Gated()
    bench = build(runner, capacity=6)
    ids = enqueue(bench.client, 40, max_tokens=3)
    threads = [bench.run(ids[:20]), bench.run(ids[20:])]
    wait_until(lambda: len(bench.client.list_jobs(state="running", limit=100)) == 6)
    assert bench.service.in_flight.room == 0
    assert len(bench.client.list_jobs(state="queued", limit=100)) == 34
    runner.gate.set()
    for thread in threads:
        thread.join(30)
    assert bench.client.stats()["state"] == {"succeeded": 40}


def test_prompt_that_cannot_be_tokenised_fails_alone(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    bad = bench.client.enqueue("unspeakable")
    good = enqueue(bench.client, 3, max_tokens=3)
    bench.service.run_shard([good[0], bad, *good[1:]])
    failed = bench.client.get(bad)
    assert (failed.state, failed.stop_reason) == (JobState.FAILED, StopReason.ERROR)
    assert failed.error == "the template refuses"
    assert [entry["error"] for entry in failed.errors] == ["the template refuses"]
    assert {bench.client.get(job_id).state for job_id in good} == {JobState.SUCCEEDED}


def test_failing_engine_gives_its_jobs_to_other_workers_and_ends_the_process(
    build: Callable[..., Bench],
) -> None:
    runner = Faulty()
    bench = build(runner, capacity=4)
    runner.broken = True
    ids = enqueue(bench.client, 10, max_tokens=5)
    bench.service.run_shard(ids)
    assert bench.fatal == ["the engine failed: the arithmetic gave out"]
    jobs = bench.client.store.find(_these(ids))
    assert {job.state for job in jobs} == {JobState.QUEUED}
    struck = [job for job in jobs if job.failures]
    assert len(struck) == 4  # those that were claimed
    assert all("the arithmetic gave out" in job.errors[0]["error"] for job in struck)
    healthy = build(ScriptedRunner(), name="b")
    healthy.service.run_shard(ids)
    assert bench.client.stats()["state"] == {"succeeded": 10}


def test_cancelled_job_frees_its_pages_and_keeps_its_text(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner(script=[0, 1] * 90))
    # The scripted runner takes the seed for the length of the prompt.
    job_id = bench.client.enqueue("prompt", max_tokens=150, ignore_eos=True, seed=len(PROMPT))
    original, tokens_at_cancel = bench.engine.step, []

    def step() -> Any:
        done = original()
        if bench.engine.stats.generated_tokens == 10 and not tokens_at_cancel:
            tokens_at_cancel.append(10)
            bench.client.cancel(job_id)
            bench.service.poll_cancellations()
        return done

    bench.engine.step = step  # type: ignore[method-assign]
    bench.service.run_shard([job_id])
    job = bench.client.get(job_id)
    assert (job.state, job.stop_reason, job.completion_tokens) == (
        JobState.CANCELLED,
        StopReason.CANCELLED,
        10,
    )
    assert job.text == "ab" * 5
    bench.engine.check_integrity()
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_draining_finishes_what_it_can_and_hands_the_rest_back(build: Callable[..., Bench]) -> None:
    runner = Gated()
    bench = build(runner, capacity=4)
    ids = enqueue(bench.client, 9, max_tokens=3)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 4)
    bench.service.drain_seconds = 0.0
    drained = threading.Thread(target=bench.service.drain)
    drained.start()
    wait_until(lambda: bench.service.draining)
    runner.gate.set()
    drained.join(30)
    thread.join(30)
    jobs = bench.client.store.find(_these(ids))
    assert all(job.state in (JobState.QUEUED, JobState.SUCCEEDED) for job in jobs)
    left = [job for job in jobs if job.state is JobState.QUEUED]
    assert len(left) >= 5 and all(job.failures == 0 for job in left)
    announced = [job_id for item in Sweep(bench.claims.database).unsent(100) for job_id in item.job_ids]
    assert sorted(announced) == sorted(job.id for job in left)


def test_claims_that_the_worker_lost_sight_of_are_handed_back(
    build: Callable[..., Bench], clock: Clock
) -> None:
    bench = build(ScriptedRunner())
    ids = enqueue(bench.client, 2)
    assert len(bench.claims.claim(ids)) == 2  # as if the answer had been lost on the way
    bench.service.reconcile()
    assert bench.client.stats()["state"] == {"running": 2}  # the answer may still be under way
    clock.advance(60)
    bench.service.reconcile()
    assert bench.client.stats()["state"] == {"queued": 2}


def test_jobs_taken_by_another_worker_are_dropped(build: Callable[..., Bench], clock: Clock) -> None:
    runner = Gated()
    bench = build(runner)
    ids = enqueue(bench.client, 3, max_tokens=100, ignore_eos=True)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.service.in_flight.keys()) == 3)
    clock.advance(3600)
    other = Claims(bench.client.database, "b" * 32)
    other.register("host", 2, "model", None)
    assert sorted(Sweep(other.database).rescue(timedelta(seconds=30))) == sorted(ids)
    assert len(other.claim(ids)) == 3
    bench.service.reconcile()
    runner.gate.set()
    thread.join(30)
    assert {job.state for job in bench.client.store.find(_these(ids))} == {JobState.RUNNING}
    assert {job.worker for job in bench.client.store.find(_these(ids))} == {"b" * 32}
    assert bench.engine.stats.free_pages == bench.engine.stats.pages


def test_results_wait_for_a_database_that_is_away(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    finish, failures = bench.claims.finish, []

    def away_twice(outcomes: Any) -> int:
        if len(failures) < 2:
            failures.append(1)
            raise DatabaseUnreachableError
        return finish(outcomes)

    monkeypatch.setattr(bench.service._writer, "_write", away_twice)
    ids = enqueue(bench.client, 3, max_tokens=3)
    bench.service.run_shard(ids)
    assert len(failures) == 2
    assert bench.client.stats()["state"] == {"succeeded": 3}


LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "stop": ("STOPSTOPSTOP",)}


def undisturbed(seed: int) -> tuple[tuple[int, ...], str]:
    """Tokens and text of a long job that nothing interrupts."""
    return expected(make_request("j", PROMPT, seed=seed, **LONG), 200)[:2]


def drain_in_the_middle(bench: Bench, ids: list[str]) -> None:
    """Let the bench draw some tokens of each job, then have it stop."""
    assert isinstance(bench.runner, Pausing)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.runner.batches) == bench.runner.pause_at)
    drained = threading.Thread(target=stop, args=(bench,))
    drained.start()
    wait_until(lambda: bench.service.draining)
    bench.runner.gate.set()
    drained.join(30)
    thread.join(30)


def test_a_drained_workers_jobs_go_on_from_their_tokens_elsewhere(build: Callable[..., Bench]) -> None:
    leaving = build(Pausing())
    ids = [leaving.client.enqueue("prompt", seed=seed, **LONG) for seed in range(5)]
    drain_in_the_middle(leaving, ids)
    assert {job.state for job in leaving.client.store.find(_these(ids))} == {JobState.QUEUED}
    taking_over = build(ScriptedRunner(), name="b")
    taking_over.service.run_shard(ids)
    for seed, job_id in enumerate(ids):
        job = leaving.client.get(job_id)
        assert (job.text, job.completion_tokens, job.prompt_tokens) == (undisturbed(seed)[1], 120, 3)
    before, after = leaving.engine.stats, taking_over.engine.stats
    assert after.resumed_tokens == before.generated_tokens >= 39
    assert after.generated_tokens + after.resumed_tokens == 5 * 120  # nothing was drawn twice


@pytest.mark.parametrize("changed", ["model", "prompt"])
def test_tokens_of_another_model_or_prompt_are_not_gone_on_from(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    leaving = build(Pausing())
    job_id = leaving.client.enqueue("prompt", seed=7, **LONG)
    drain_in_the_middle(leaving, [job_id])
    text = undisturbed(7)[1]
    if changed == "model":
        other = build(ScriptedRunner(), name="b", model_digest="another")
    else:
        monkeypatch.setattr(Bench, "tokenize", staticmethod(lambda claim: (3, 2, 1)))
        other = build(ScriptedRunner(), name="b")
        text = expected(make_request("j", (3, 2, 1), seed=7, **LONG), 200)[1]
    other.service.run_shard([job_id])
    assert leaving.client.get(job_id).text == text
    assert other.engine.stats.resumed_tokens == 0
    assert other.engine.stats.generated_tokens == 120


def test_what_is_saved_on_the_way_outlives_a_worker_that_dies(
    build: Callable[..., Bench], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = build(ScriptedRunner())
    engine, saved = doomed.engine, []
    step, save = engine.step, doomed.claims.save

    def until_it_dies() -> Any:
        return [] if engine.stats.generated_tokens == 30 else step()

    def watched(group: Any) -> int:
        saved.append([(one.job_id, len(one.token_ids)) for one in group])
        return save(group)

    monkeypatch.setattr(engine, "step", until_it_dies)
    monkeypatch.setattr(doomed.claims, "save", watched)
    job_id = doomed.client.enqueue("prompt", seed=7, **LONG)
    doomed.run([job_id])
    wait_until(lambda: engine.stats.generated_tokens == 30)
    doomed.service.save_partials()
    doomed.service.save_partials()  # it has not grown since
    assert saved == [[(job_id, 30)]]
    clock.advance(3600)
    other = build(ScriptedRunner(), name="b")
    assert Sweep(other.claims.database).rescue(timedelta(seconds=30)) == [job_id]
    other.service.run_shard([job_id])
    assert other.client.get(job_id).text == undisturbed(7)[1]
    assert other.engine.stats.resumed_tokens == 30
    assert other.engine.stats.generated_tokens == 90


def test_a_database_that_is_slow_to_save_holds_up_no_token(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(Pausing())
    released, written = threading.Event(), []
    save = bench.claims.save

    def slow(group: Any) -> int:
        assert released.wait(60)
        written.append(save(group))
        return written[0]

    monkeypatch.setattr(bench.claims, "save", slow)
    job_id = bench.client.enqueue("prompt", seed=7, **LONG)
    thread = bench.run([job_id])
    wait_until(lambda: len(bench.runner.batches) == 40)
    saver = threading.Thread(target=bench.service.save_partials)
    saver.start()
    wait_until(lambda: bench.service.engine._question == 1)  # it has asked
    bench.runner.gate.set()
    thread.join(30)
    assert not thread.is_alive()
    assert bench.client.get(job_id).text == undisturbed(7)[1]
    released.set()
    saver.join(30)
    assert written == [0]  # too late: the job has ended


def _these(ids: list[str]) -> Selection:
    return Selection(ids=ids)
